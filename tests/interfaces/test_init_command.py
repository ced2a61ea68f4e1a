"""`palestra init` writes an agent that trains."""

import json
import runpy
from pathlib import Path

import pytest

from palestra.cli.main import run


def test_the_agent_file_loads_from_any_folder_and_has_its_cases(tmp_path: Path) -> None:
    name, instructions = 'the "clerk"', "Say {what} is in stock."
    assert run(["init", str(tmp_path / "new"), "--name", name, "--instructions", instructions, "--yes"]) == 0
    module = runpy.run_path(str(tmp_path / "new" / "agent.py"))
    assert (module["agent"].name, module["agent"].instructions) == (name, instructions)
    assert module["agent"].model == "palestra/tiny"
    cases = [json.loads(line) for line in (tmp_path / "new" / "cases.jsonl").read_text().splitlines()]
    assert len(module["suite"]) == len(cases) > 100
    stock = module["STOCK"]
    for case in cases[:5]:
        first, second = case["input"].removeprefix("How many ").removesuffix(" are in stock?").split(" and ")
        assert stock[first.removesuffix("s")] + stock[second.removesuffix("s")] == case["expect"]


def test_another_model_gets_no_settings_for_a_small_one(tmp_path: Path) -> None:
    assert run(["init", str(tmp_path), "--model", "palestra/smollm2", "--yes"]) == 0
    assert "config" not in runpy.run_path(str(tmp_path / "agent.py"))


def test_what_it_wrote_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--yes"]) == 0
    assert run(["train", "agent.py", "--folder", "run", "--train.max_steps", "1", "--eval.cases", "2"]) == 0
    assert (tmp_path / "run" / "report.json").is_file()


def test_existing_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cases.jsonl").write_text("mine")
    assert run(["init", str(tmp_path), "--yes"]) == 2
    assert "cases.jsonl" in capsys.readouterr().err
    assert (tmp_path / "cases.jsonl").read_text() == "mine"
    assert not (tmp_path / "agent.py").exists()
