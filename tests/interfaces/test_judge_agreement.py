"""examples/judge_agreement.py: a judge against labels, over HTTP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT
from tests.support.judge_server import attempts_of, ranks, stub_model


def labels(tmp_path: Path) -> str:
    """Good answers are short here."""
    rows = []
    for i in range(6):
        case = {"input": f"What is {i} + {i}?", "expect": str(2 * i)}
        rows += [case | {"answer": f"{2 * i}", "label": 1}, case | {"answer": "It is hard to tell. " * 3, "label": 0}]
    path = tmp_path / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def check(tmp_path: Path, judge: str, without: str = "none") -> subprocess.CompletedProcess[str]:
    (tmp_path / "score.py").write_text(f"from palestra import judge, measure, ruler\n{judge}")
    code = f"import runpy, sys; sys.modules[{without!r}] = None; del sys.argv[0]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [str(ROOT / "examples" / "judge_agreement.py"), labels(tmp_path), f"{tmp_path}/score.py:quality"]
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=100)


def test_it_says_what_to_install(tmp_path: Path) -> None:
    assert "pip install scipy" in check(tmp_path, "", without="scipy").stderr


def test_a_judge_that_agrees_has_tau_1(tmp_path: Path) -> None:
    pytest.importorskip("scipy")

    def right(question: str) -> str:
        return json.dumps({"score": 0.0 if "hard to tell" in question else 0.9, "reason": "checked"})

    with stub_model(right) as stub:
        done = check(tmp_path, f"quality = judge('m', 'Is it right?', base_url={stub.base_url!r})")
    assert "12 attempts at 6 cases, 0 without a verdict" in done.stdout
    assert "tau 1.00 (95 % interval 1.00 to 1.00)" in done.stdout
    assert len(stub.bodies) == 12


def test_a_judge_that_ranks_by_length_disagrees(tmp_path: Path) -> None:
    pytest.importorskip("scipy")

    def by_length(question: str) -> str:
        return ranks([min(1.0, len(text) / 100) for text in attempts_of(question)])

    with stub_model(by_length) as stub:
        done = check(tmp_path, f"quality = ruler('m', base_url={stub.base_url!r})")
    assert len(stub.bodies) == 6  # one for each case
    assert "tau -1.00" in done.stdout
    assert "of the scores 1.00, of the labels -1.00" in done.stdout


def test_lost_verdicts_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    done = check(tmp_path, "@measure\ndef quality(ctx):\n    raise OSError('x')")
    assert "12 without a verdict" in done.stdout
    assert "no two attempts with a verdict" in done.stderr
