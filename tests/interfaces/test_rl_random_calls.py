"""Thousands of random tool calls: every answer is JSON, nothing crashes, no lock gives way, no secret gets out.

PALESTRA_RANDOM_CALLS=20000 makes it the long form.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from palestra.agent_tools import TOOL_NAMES, RlTools
from palestra.agent_tools import tools as tools_module
from palestra.runs.locks import RequestLimits, Site

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


class Monkey:
    """Draws calls: good ones, nearly good ones, and rubbish."""

    def __init__(self, seed: int, fields: list[str]) -> None:
        self.rng = random.Random(seed)
        self.fields = fields
        self.run_ids = ["zzzzzzzz"]

    def text(self) -> str:
        return self.rng.choice(
            [
                lambda: "",
                lambda: "calculator",
                lambda: "x" * self.rng.choice([10, 1000, 200_000]),
                lambda: "".join(chr(self.rng.randrange(0x110000)) for _ in range(self.rng.randrange(1, 20))),
                lambda: self.rng.choice(
                    ["../../etc/passwd", "'; drop table runs; --", "\x00", "\ud800", "${HOME}", "%s%n"]
                ),
                lambda: self.rng.choice(list(SECRETS.values())),
                lambda: self.rng.choice(["5", "-1", "1e999", "NaN", "true", "None", "[1, 2]", '{"a": 1}', "0x10"]),
            ]
        )()

    def value(self, depth: int = 0) -> Any:
        simple = [
            self.text, lambda: None, lambda: self.rng.choice([True, False]), lambda: self.rng.randrange(-3, 12),
            lambda: self.rng.choice([10**30, -(10**18), 2**63]), lambda: self.rng.uniform(-1, 1),
            lambda: self.rng.choice([float("nan"), float("inf"), -0.0, 1e308]), object,
            lambda: b"bytes", lambda: {1, 2},
        ]  # fmt: skip
        nested = [
            lambda: [self.value(depth + 1) for _ in range(self.rng.randrange(4))],
            lambda: {self.text()[:50]: self.value(depth + 1) for _ in range(self.rng.randrange(4))},
            lambda: self.deep(),
        ]
        return self.rng.choice(simple if depth > 2 else simple + nested)()

    def deep(self) -> list[Any]:
        inner: list[Any] = []
        for _ in range(self.rng.choice([5, 100, 5000])):
            inner = [inner]
        return inner

    def call(self) -> tuple[Any, Any]:
        kind = self.rng.random()
        if kind < 0.05:
            return self.value(), self.value()
        name = self.rng.choices(TOOL_NAMES, [2, 1, 5, 50, 6, 8, 4, 6, 4, 2])[0]
        if kind < 0.15:
            return name, self.value()
        if kind < 0.25:
            return name, {self.rng.choice(PLAIN_NAMES): self.value() for _ in range(self.rng.randrange(4))}
        return name, self.likely(name)

    def likely(self, name: str) -> dict[str, Any]:
        match name:
            case "rl_select_environment":
                return {
                    "name": self.rng.choice(["calculator", "echo-number"]) if self.rng.random() < 0.1 else self.text()
                }
            case "rl_edit_config":
                field = self.rng.choice(self.fields) if self.rng.random() < 0.9 else self.text()
                return {"field": field, "value": self.value()}
            case "rl_check_status" | "rl_stop_training" | "rl_get_results":
                return {"run_id": self.rng.choice(self.run_ids) if self.rng.random() < 0.7 else self.text()}
            case "rl_test_inference":
                # one in a few is in bounds, and starts a process that has no time to get anywhere
                steps = 1 if self.rng.random() < 0.1 else self.value()
                return {
                    "num_steps": steps,
                    "group_size": 2,
                    "models": self.rng.choice([["palestra/tiny"], self.value()]),
                }
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
    monkey, faults, started = Monkey(0, fields), [], 0
    for _ in range(CALLS):
        tools = monkey.rng.choice(clients)
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
