"""`palestra export`: what it makes of a run and of a model, and what it says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub import TOKEN, FakeHub

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
    said = cli.json("export", run.path.name, "--to", "gguf")
    path = Path("runs") / run.path.name / "export" / f"{run.path.name}-q8_0.gguf"
    assert said == {"to": "gguf", "path": str(path), "type": "q8_0"}
    assert path.read_bytes().startswith(b"GGUF")
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_run_becomes_an_ollama_model(cli: Any, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in ("clerk-two", "clerk"):
        answer = cli.ok("export", str(run.path), "--to", "ollama", "--name", name, "--type", "f16")
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


def test_a_run_becomes_one_page_that_needs_neither_model_nor_network(cli: Any, run: RunFolder) -> None:
    shutil.rmtree(run.model)
    message = {"role": "assistant", "text": "It is 7.", "tool_calls": []}
    score = {"value": 1.0, "passed": True, "reason": "right"}
    about = {"problem_id": "p1", "passed": True, "stop": "answered", "error": None, "seconds": 0.1, "turns": []}
    rows = [
        {"step": 1, "group": 0, **about, "reward": reward, "messages": [message], "scores": {"right": score}}
        for reward in (1.0, 0.0)
    ]
    run.rollouts_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Path(cli.json("export", run.path.name, "--to", "html")["path"]).read_text()
    assert page.count("It is 7.") == 2
    assert "1 of 1 groups" in page


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("palestra/tiny --to ollama --name", "'a b'"),
        ("{run} --to gguf", "palestra train --resume runs/{run}"),  # it has no model
        ("{run} --to hf --groups 3", "--groups"),
        ("palestra/tiny --to hf --public", "--public"),
    ],
)
def test_what_cannot_be_exported_is_rejected_with_the_remedy(cli: Any, run: RunFolder, words: str, remedy: str) -> None:
    shutil.rmtree(run.model)
    name = run.path.name
    more = ["a b"] if words.endswith("--name") else []
    assert remedy.format(run=name) in cli.error("export", *words.format(run=name).split(), *more)
    assert [path.name for path in Path.cwd().iterdir()] == ["runs"]


# --- The hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(serve: Any) -> Any:
    fake = FakeHub()
    fake.url = serve(fake.app)
    return fake


def export(hub: Any, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """In a process: huggingface_hub reads its address and the offline mode when it is imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"} | environ
    command = [sys.executable, "-m", "palestra", "export", *words, "--to", "hub", "--json"]
    return subprocess.run(command, capture_output=True, text=True, env={k: v for k, v in env.items() if v})


def test_a_run_becomes_a_private_repository_with_its_evaluation(run: RunFolder, hub: Any) -> None:
    rate = {"n": 28, "passed": 27, "rate": 0.964, "low": 0.823, "high": 0.994}
    scored = {"pass_rate": rate, "measures": [{"name": "right", "pass_rate": rate}], "split": "held_out"}
    config = RunConfig.build({"train.learning_rate": 3e-5, "track.project": "secret"}).model_dump(mode="json")
    about = {"agent": "clerk", "model": "palestra/tiny", "seconds": 60, "seed": 3, "config": config, "metrics": [{}]}
    run.report_file.write_text(json.dumps(about | {"before": scored | {"measures": []}, "after": scored}))
    made = export(hub, str(run.path), "--repo", "me/clerk")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == {"to": "hub", "repo": "me/clerk", "url": f"{hub.url}/me/clerk", "private": True}
    assert [(body["name"], body.get("private"), body.get("visibility")) for body in hub.created] in (
        [("clerk", True, None)], [("clerk", None, "private")],
    )  # fmt: skip
    files = hub.files["me/clerk"]
    assert files["model.safetensors"] == (run.model / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= files.keys()
    card = files["README.md"].decode()
    assert "| right | – | 96.4 % (82.3–99.4) |" in card
    assert "| `train.learning_rate` | 3e-05 |" in card
    assert "> Use the tools." in card
    head = yaml.safe_load(card.split("---")[1])
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.964
    assert "base_model" not in head, "it is not on the hub"
    assert "secret" not in card
    assert str(run.path) not in card + files["palestra.json"].decode()


def test_an_adapter_may_be_uploaded_as_it_is(tmp_path: Path, tiny: Any, hub: Any) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.get_peft_model(tiny.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    save_hf(adapter, tiny.tokenizer, tmp_path / "adapter", record={"agent": "clerk"})
    made = export(hub, str(tmp_path / "adapter"), "--repo", "me/lora", "--adapter", "--public")
    assert made.returncode == 0, made.stderr
    assert "adapter_model.safetensors" in hub.files["me/lora"]
    assert "library_name: peft" in hub.files["me/lora"]["README.md"].decode()
    assert hub.created[0].get("private") is not True
    assert hub.created[0].get("visibility") != "private"


@pytest.mark.parametrize(
    ("words", "environ", "remedy"),
    [
        (["--repo", "no-slash"], {}, "USER/NAME"),
        ([], {}, "--repo USER/NAME"),
        (["--repo", "me/x", "--out", "there"], {}, "--out"),
        (["--repo", "me/x"], {"HF_TOKEN": ""}, "hf auth login"),
        (["--repo", "me/x"], {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
        (["--repo", "me/x"], {"HF_TOKEN": "hf_other"}, "may write"),
    ],
)
def test_an_upload_that_cannot_be_is_refused_with_the_remedy(
    hub: Any, tmp_path: Path, words: list[str], environ: dict[str, str], remedy: str
) -> None:
    made = export(hub, "palestra/tiny", *words, HF_HOME=str(tmp_path), **environ)
    assert (made.returncode, hub.files) == (2, {})
    assert remedy in made.stderr
    assert "Traceback" not in made.stderr
