"""The core works in an installation without the folder of extras, and says which extra a name needs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "palestra"
SMALL = (
    "--train.max_steps 1 --train.problems_per_step 2 --rollout.group_size 2 --rollout.max_new_tokens 8 --eval.cases 2 "
    "--checkpoint.every 1 --output_dir runs"
)
PROGRAM = """
import contextlib, importlib, io, json, pkgutil, sys
from pathlib import Path
import palestra
from palestra.cli.main import run

def called(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words.split() if isinstance(words, str) else words)
    return [code, out.getvalue() + err.getvalue()]

if __name__ == "__main__":
    small = sys.argv[1]
    answers = {"file": palestra.__file__}
    skipped = ("palestra.__main__",)
    names = [m.name for m in pkgutil.walk_packages(palestra.__path__, "palestra.") if m.name not in skipped]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # kernels of GPUs alone need it
                raise
    answers["modules"] = len(names)
    answers["train"] = called(f"train {small}")
    folder = str(next(Path("runs").iterdir()))
    answers["resume"] = called(f"train --resume {folder} --train.max_steps 2")
    answers["eval"] = called(f"eval --model.name {folder}/model --cases cases.jsonl --measure measure.py:right")
    for words in ("dashboard", "mcp", "plan", "tinker", "env serve calculator", "env evaluate calculator",
                  "train --vllm.mode server", "train --backend ray", "train --backend tinker",
                  "eval --model.name palestra/smollm2 --cases cases.jsonl --measure measure.py:right"):
        answers[words] = called(words)
    Path("answers.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(SOURCE, folder / "src" / "palestra", ignore=shutil.ignore_patterns("extras", "__pycache__"))
    (folder / "program.py").write_text(PROGRAM)
    (folder / "cases.jsonl").write_text('{"input": "What does a red lamp cost?", "expect": "1"}\n')
    (folder / "measure.py").write_text(
        "from palestra import measure\n\n@measure\ndef right(ctx):\n    return bool(ctx.final_assistant_message)\n"
    )
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "PALESTRA_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, "program.py", SMALL], cwd=folder, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "answers.json").read_text()) | {"folder": str(folder)}


def test_every_module_of_the_core_imports_without_extras(answers):
    assert answers["file"].startswith(answers["folder"])
    assert answers["modules"] > 200


@pytest.mark.parametrize("command", ["train", "resume", "eval"])
def test_the_core_trains_resumes_and_evaluates_without_extras(answers, command):
    code, text = answers[command]
    assert code == 0, text[-2000:]


@pytest.mark.parametrize(
    ("words", "extra"),
    {
        "dashboard": "dashboard",
        "mcp": "agent_tools",
        "plan": "plan",
        "tinker": "tinker",
        "env serve calculator": "atropos",
        "env evaluate calculator": "environments",
        "train --vllm.mode server": "vllm",
        "train --backend ray": "ray",
        "train --backend tinker": "tinker",
        "eval --model.name palestra/smollm2 --cases cases.jsonl --measure measure.py:right": "gguf",
    }.items(),
)
def test_a_name_of_an_extra_is_refused_with_the_name_of_the_extra(answers, words, extra):
    code, text = answers[words]
    assert code == 2
    assert repr(extra) in text
    assert "pip install" in " ".join(text.split())
