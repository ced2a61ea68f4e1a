"""`palestra export`: what it makes of a run and of a model, and what it says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")

from palestra.agents.agent import Agent
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.models.export.hf import save_hf
from palestra.result import GRPOTrainingResult
from palestra.train.run import Outcome


@pytest.fixture
def run(tmp_path: Path, tiny: Any) -> RunFolder:
    record = {"agent": "clerk", "instructions": "Use the tools."}
    made = RunFolder.create(tmp_path / "runs", "clerk", RunConfig(), record)
    save_hf(tiny.model, tiny.tokenizer, made.model, record=record)
    return made


def test_a_run_becomes_a_gguf_file_in_its_folder(cli: Any, run: RunFolder) -> None:
    answer = cli("export", run.path.name, "--to", "gguf", "--json")
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    path = Path("runs") / run.path.name / "export" / f"{run.path.name}-q8_0.gguf"
    assert said == {"to": "gguf", "path": str(path), "type": "q8_0"}
    assert path.read_bytes().startswith(b"GGUF")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_run_becomes_an_ollama_model(cli: Any, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in ("clerk-two", "clerk"):
        answer = cli("export", str(run.path), "--to", "ollama", "--name", name, "--type", "f16")
        assert answer.code == 0, answer.err
    folder = run.path / "export" / "ollama" / "clerk"
    assert f"ollama create clerk -f {folder}/Modelfile" in answer.out
    assert "clerk-two-f16.gguf" in (folder.with_name("clerk-two") / "Modelfile").read_text(), "each name has its own"
    assert sorted(path.name for path in folder.iterdir()) == ["Modelfile", "clerk-f16.gguf"]
    assert 'SYSTEM """Use the tools."""' in (folder / "Modelfile").read_text()


def test_a_result_exports_itself_to_ollama_and_tells_the_command(run, tiny, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    outcome = Outcome(tiny.model, tiny.tokenizer, run.model, None, None, [], 0.0, run.path / "report.html")
    result = GRPOTrainingResult(Agent("clerk", "palestra/tiny"), run, outcome)
    made = result.to_ollama("clerk", quantization="f16")
    assert f"run: ollama create clerk -f {made.modelfile}" in caplog.text
    assert made.modelfile.parent == run.path / "export" / "ollama" / "clerk"
    assert 'SYSTEM """Use the tools."""' in made.modelfile.read_text()
    assert f"litellm/ollama_chat/{made}" == "litellm/ollama_chat/" + made == "litellm/ollama_chat/clerk"
    second = result.to_ollama("clerk-two", quantization="f16")
    assert (made.name, second.name) == ("clerk", "clerk-two")
    assert "clerk-f16.gguf" in made.modelfile.read_text(), "the second export left the first as it was"


def test_a_model_becomes_a_hugging_face_folder(cli: Any, tmp_path: Path) -> None:
    answer = cli("export", "palestra/tiny", "--to", "hf", "--out", "out/tiny", "--json")
    assert json.loads(answer.out) == {"to": "hf", "path": "out/tiny"}
    names = {path.name for path in (tmp_path / "out" / "tiny").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"} <= names


def test_a_name_that_ollama_does_not_take_is_rejected(cli: Any, tmp_path: Path) -> None:
    answer = cli("export", "palestra/tiny", "--to", "ollama", "--name", "a b")
    assert (answer.code, "'a b'" in answer.err, list(tmp_path.iterdir())) == (2, True, [])


def test_a_run_without_a_model_says_how_to_go_on(cli: Any, run: RunFolder) -> None:
    shutil.rmtree(run.model)
    answer = cli("export", run.path.name, "--to", "gguf")
    assert answer.code == 2
    assert f"palestra train --resume runs/{run.path.name}" in answer.err
