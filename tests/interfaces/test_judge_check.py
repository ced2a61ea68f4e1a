"""`palestra judge-check`: a judge against labels, over HTTP."""

import json
from pathlib import Path

import pytest
from tests.support.judge_server import attempts_of, ranks, stub_model

pytestmark = pytest.mark.extras


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labels(tmp_path: Path) -> str:
    """Good answers are short here."""
    rows = []
    for i in range(6):
        case = {"input": f"What is {i} + {i}?", "expect": str(2 * i)}
        rows += [case | {"answer": f"{2 * i}", "label": 1}, case | {"answer": "It is hard to tell. " * 3, "label": 0}]
    return write(tmp_path / "labels.jsonl", rows)


def right(question: str) -> str:
    return json.dumps({"score": 0.0 if "hard to tell" in question else 0.9, "reason": "checked"})


def test_a_judge_that_agrees_has_tau_1(cli, tmp_path: Path) -> None:
    with stub_model(right) as stub:
        done = cli(
            "judge-check", labels(tmp_path), "--model", "m", "--base-url", stub.base_url, "--rubric", "?", "--json"
        )
    found = json.loads(done.out)
    assert done.code == 0
    assert (found["attempts"], found["cases"], found["no_verdict"]) == (12, 6, 0)
    assert found["agreement"]["tau"] == 1.0
    assert found["agreement"]["pairs"] == 6
    assert found["judge"]["calls"] == 12
    assert not found["prefers_length"]


def test_a_judge_that_prefers_length_is_told_apart_from_the_labels(cli, tmp_path: Path) -> None:
    def by_length(question: str) -> str:
        return ranks([min(1.0, len(text) / 100) for text in attempts_of(question)])

    with stub_model(by_length) as stub:
        done = cli("judge-check", labels(tmp_path), "--model", "m", "--base-url", stub.base_url, "--rank", "--json")
    found = json.loads(done.out)
    assert found["judge"]["calls"] == 6  # one for each case
    assert found["agreement"]["tau"] == -1.0
    assert found["prefers_length"]
    assert "length is no merit" in done.err


def test_a_measure_of_a_file_is_checked_and_lost_verdicts_are_counted(cli, tmp_path: Path) -> None:
    code = "from palestra import measure\n@measure\ndef quality(ctx):\n    return ctx.messages[-1].text.isdecimal()"
    (tmp_path / "score.py").write_text(code)
    (tmp_path / "broken.py").write_text(
        "from palestra import measure\n@measure\ndef quality(ctx):\n    raise OSError('x')"
    )
    file = labels(tmp_path)
    good = cli.json("judge-check", file, "--measure", f"{tmp_path}/score.py:quality")
    assert good["agreement"]["agreed"] == 1.0
    lost = cli("judge-check", file, "--measure", f"{tmp_path}/broken.py:quality", "--json")
    assert json.loads(lost.out)["no_verdict"] == 12
    assert json.loads(lost.out)["agreement"] is None


@pytest.mark.parametrize(
    ("rows", "options", "word"),
    [
        ([{"input": "a", "answer": "b"}], ["--model", "palestra/tiny", "--rubric", "x"], "label"),
        ([{"input": "a", "label": 1}], ["--model", "palestra/tiny", "--rubric", "x"], "answer"),
        ([{"input": "a", "answer": "b", "label": 1}], [], "--measure"),
        ([], ["--model", "palestra/tiny", "--rubric", "x"], "no attempts"),
    ],
)
def test_wrong_input_names_what_is_missing(
    cli, tmp_path: Path, rows: list[dict], options: list[str], word: str
) -> None:
    assert word in cli.error("judge-check", write(tmp_path / "labels.jsonl", rows), *options)
