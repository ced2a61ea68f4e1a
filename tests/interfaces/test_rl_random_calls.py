"""Thousands of random tool calls: every answer is JSON, nothing crashes, no lock gives way, no secret gets out.

PALESTRA_RANDOM_CALLS=20000 makes it the long form.
"""

import json
import os
import random
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from palestra.extras.agent_tools import TOOL_NAMES, RlTools
from palestra.extras.agent_tools import tools as tools_module
from palestra.extras.agent_tools.locks import RequestLimits, Site

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent
from rl_agent import NothingStarts

CALLS = int(os.environ.get("PALESTRA_RANDOM_CALLS", "2000"))
MOST_RUNS = 8
SECRETS = {
    "OPENROUTER_API_KEY": "sk-or-0123456789abcdef",
    "DB_PASSWORD": "correct horse battery",
    "HF_TOKEN": "hf_abcdefgh",
}
PLAIN_NAMES = ["name", "field", "value", "run_id", "num_steps", "group_size", "models", "x", ""]
WORDS = ["", "calculator", "../../etc/passwd", "'; drop table runs; --", "\x00", "\ud800", "${HOME}", "%s%n", "5", "-1"]
WORDS += ["1e999", "NaN", "true", "None", "[1, 2]", '{"a": 1}', "0x10", "x" * 1000, "x" * 200_000, *SECRETS.values()]
NUMBERS = [None, True, False, 10**30, -(10**18), 2**63, float("nan"), float("inf"), -0.0, 1e308, 0.3, *range(-3, 12)]


class Monkey(random.Random):
    """Draws calls: good ones, nearly good ones, and rubbish."""

    fields: list[str]
    run_ids: list[str]

    def text(self) -> str:
        if self.random() < 0.8:
            return self.choice(WORDS)
        return "".join(chr(self.randrange(0x110000)) for _ in range(self.randrange(1, 20)))

    def value(self, depth: int = 0) -> Any:
        kind = self.random()
        if kind < 0.2 and depth <= 2:
            return [self.value(depth + 1) for _ in range(self.randrange(4))]
        if kind < 0.3 and depth <= 2:
            return {self.text()[:50]: self.value(depth + 1) for _ in range(self.randrange(4))}
        if kind < 0.35:
            return reduce(lambda inner, _: [inner], range(self.choice([5, 100, 5000])), [])
        return self.text() if kind < 0.5 else self.choice([*NUMBERS, object(), b"bytes", {1, 2}])

    def call(self) -> tuple[Any, Any]:
        kind = self.random()
        if kind < 0.05:
            return self.value(), self.value()
        name = self.choices(TOOL_NAMES, [2, 1, 5, 50, 6, 8, 4, 6, 4, 2])[0]
        if kind < 0.15:
            return name, self.value()
        if kind < 0.25:
            return name, {self.choice(PLAIN_NAMES): self.value() for _ in range(self.randrange(4))}
        return name, self.likely(name)

    def likely(self, name: str) -> dict[str, Any]:
        match name:
            case "rl_select_environment":
                return {"name": self.choice(["calculator", "echo-number"]) if self.random() < 0.1 else self.text()}
            case "rl_edit_config":
                return {
                    "field": self.choice(self.fields) if self.random() < 0.9 else self.text(),
                    "value": self.value(),
                }
            case "rl_check_status" | "rl_stop_training" | "rl_get_results":
                return {"run_id": self.choice(self.run_ids) if self.random() < 0.7 else self.text()}
            case "rl_test_inference":
                # one in a few is in bounds, and starts a process that has no time to get anywhere
                steps = 1 if self.random() < 0.1 else self.value()
                return {"num_steps": steps, "group_size": 2, "models": self.choice([["palestra/tiny"], self.value()])}
            case _:
                return {}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_random_calls_break_nothing(tmp_path, monkeypatch):
    rl_agent.make_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools_module, "_STOP_WAIT_S", 0.0)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    limits = RequestLimits(status_check_minutes=0.0001, test_completions=4, test_minutes=0.002)
    locked = {"trainer": {"learning_rate": 1e-4}, "run": {"rollout.temperature": 1.0}}
    manager = NothingStarts(tmp_path / "home")
    clients = [RlTools(manager, Site.model_validate({"limits": limits, **locked})) for _ in range(2)]
    config, _ = [_select(tools) for tools in clients]
    fields = [f["name"] for key in ("configurable_fields", "locked_fields") for f in config[key]]
    fields += ["train.learning_rate", "learning_rate", "base_url", "output_dir", "model.name", "wandb_name"]
    monkey, faults, started = Monkey(0), [], 0
    monkey.fields, monkey.run_ids = fields, ["zzzzzzzz"]
    for _ in range(CALLS):
        tools = monkey.choice(clients)
        name, arguments = monkey.call()
        if name == "rl_start_training" and started >= MOST_RUNS:
            continue
        answer = tools.call(name, arguments)
        text = json.dumps(answer, allow_nan=False, ensure_ascii=False).encode().decode()
        assert isinstance(answer, dict)
        assert not any(secret in text for secret in SECRETS.values()), (name, arguments)
        faults += [(name, arguments, answer)] if "fault of Palestra" in text else []
        if name == "rl_edit_config" and "value" in answer:
            _require_locks(tools, config)
        if "run_id" in answer and name == "rl_start_training":
            started += 1
            monkey.run_ids.append(answer["run_id"])
            request = json.loads(Path(answer["config_path"]).with_name("request.json").read_text())
            assert request["settings"]["train.learning_rate"] == 1e-4
            assert request["settings"]["rollout.temperature"] == 1.0
            assert "output_dir" not in request["settings"]
    assert not faults, faults[0]
    assert started
    for path in tmp_path.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret.encode() in content for secret in SECRETS.values()), path


def _select(tools: RlTools) -> dict[str, Any]:
    assert "error" not in tools.rl_select_environment("calculator")
    return tools.rl_get_current_config()


def _require_locks(tools: RlTools, before: dict[str, Any]) -> None:
    """What is locked is what it was; two of the locks follow the model's name."""
    follow = ("env.tokenizer_name", "server.model_name")
    values = [
        {f["name"]: f["locked_value"] for f in config["locked_fields"] if f["name"] not in follow}
        for config in (before, tools.rl_get_current_config())
    ]
    assert values[0] == values[1]
