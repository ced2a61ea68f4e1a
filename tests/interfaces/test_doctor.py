"""`palestra doctor`, `config --locked`, `tools schema`."""

import json
from importlib.metadata import version

import pytest

from palestra.cli import doctor
from palestra.cli.main import run


def test_doctor_tells_what_there_is_each_lack_with_its_remedy_and_no_key(cli, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wk-0123456789")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    answer = cli.ok("doctor", "--json")
    data = json.loads(answer.out)
    found = {(row["topic"], row["name"]): row for row in data["findings"]}
    assert data["ok"]
    assert found["Python", "palestra"]["found"].startswith(version("palestra"))
    assert found["Python", "version"]["state"] == found["torch", "version"]["state"] == "ok"
    assert found["keys", "WANDB_API_KEY"]["found"] == "set"
    assert found["keys", "TINKER_API_KEY"]["state"] == "missing"
    assert {"mcp", "http", "wandb"} <= {name for topic, name in found if topic == "extras"}
    assert {topic for topic, _ in found} == {"Python", "torch", "room", "extras", "keys", "ports", "sandbox"}
    assert all(row["remedy"] for row in data["findings"] if row["state"] != "ok")
    assert "wk-0123456789" not in answer.out


def test_doctor_fails_only_when_something_needed_is_broken(monkeypatch, capsys):
    findings = [doctor.Check("torch", "import", "broken", "No module named 'torch'", "pip install torch")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert run(["doctor"]) == 1
    assert "→ pip install torch" in capsys.readouterr().out


def test_locks_are_shown_as_they_hold_here(cli, tmp_path):
    (tmp_path / "palestra.yaml").write_text("profile: tinker\nlimits: {test_models: 2}\nmaximum: {lora.r: 8}")
    shown, data = cli("config", "--locked"), cli.json("config", "--locked")
    assert "learning_rate = 4e-05" in shown.out
    assert "lora.r = 8" in shown.out
    assert "test_models = 2" in shown.out
    assert {lock["name"]: lock["value"] for lock in data["locks"]}["trainer.lora_rank"] == 32
    assert data["limits"]["test_models"] == 2
    (tmp_path / "palestra.yaml").write_text("profil: tinker")
    assert "Did you mean 'profile'" in cli("config", "--locked").err


@pytest.mark.extras
def test_schemas_are_printed_for_function_calling(cli):
    schemas = json.loads(cli("tools", "schema").out)
    assert len(schemas) == 10
    assert schemas[0]["function"]["name"] == "rl_list_environments"
    assert "rl_edit_config(field, value)" in cli("tools", "schema", "--list").out
