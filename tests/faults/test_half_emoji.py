"""Half an emoji from the model, user code or a judge costs no run, no attempt, no record and no checkpoint."""

import json
import random
from collections import Counter
from typing import Any

import pytest

from palestra import Env, EnvConfig
from palestra.cli.main import run
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message, Score
from palestra.env_api import train_env
from palestra.envs.running import RunningEnv
from palestra.models.chat.callformats import FORMATS, parse_assistant
from palestra.models.chat.template import ChatFormat

HALF = "\ud83d lamp"
STEPS = 2

AGENT_FILE = """
from itertools import count
from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason

calls = count(1)

@function_tool
def stock(item: str) -> str:
    \"\"\"Look an item up.\"\"\"
    return item + " \\ud83d"

@measure
def verdict(ctx):
    return pass_reason("\\ud83d") if len(ctx.final_assistant_message.text) % 2 else fail_reason([b"\\xff", "\\ud83d"])

@measure
def raises(ctx):
    if next(calls) % 5 == 0:
        raise ValueError("\\ud83d")
    return 1.0

agent = Agent("clerk", "palestra/tiny", "Use the tools.", [stock])
suite = EvalSuite.from_records(
    [{"input": f"\\ud83d lamp {i}?", "expect": "\\ud83d", "\\ude00": i} for i in range(12)], measures=[verdict, raises]
)
"""


def model_text(rng: random.Random) -> tuple[Any, str]:
    """A call with halves of emojis in its name, keys and arguments in one of all formats, as a model escapes them."""
    name = rng.choice(["stock", "stock\ud83d"])
    keys = rng.sample(["item", "item\ude00", "\ud83d"], 2)
    value = rng.choice([HALF, {HALF: [HALF]}, "plain"])
    form = rng.choice(FORMATS)
    text = form.write([(name, {key: value for key in keys})])
    return form, text.replace("\ud83d", "\\ud83d").replace("\ude00", "\\ude00")


def test_a_training_records_every_attempt_of_a_model_that_writes_halves_in_all_formats(tmp_path, monkeypatch):
    rng, seen = random.Random(5), Counter()

    def read(self: Any, ids: Any, tools: Any = (), prompt_end: Any = (), unexpected: Any = "execute") -> Message:
        if rng.random() < 0.3:
            return Message("assistant", f"half {HALF}" + "." * rng.randrange(2))
        form, text = model_text(rng)
        reply = parse_assistant(text, form, tools)
        seen[form.name] += bool(reply.calls)
        return Message("assistant", reply.text, tool_calls=reply.calls)

    monkeypatch.setattr(ChatFormat, "read", read)
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    (tmp_path / "my_agent.py").write_text(AGENT_FILE)
    settings = {
        "output_dir": tmp_path / "runs", "train.max_steps": STEPS, "train.problems_per_step": 4,
        "rollout.group_size": 4, "rollout.max_new_tokens": 24, "checkpoint.every": 1,
    }  # fmt: skip
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    assert run(["train", str(tmp_path / "my_agent.py"), *options]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    rows = list(RunFolder.open(folder).rollouts())
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, STEPS + 1), 16)
    assert sum(len(message["tool_calls"]) for row in rows for message in row["messages"]) > 8 * STEPS
    assert len(seen) > 5
    assert (folder / "checkpoints" / f"step-{STEPS:06d}").is_dir()
    assert (folder / "model").is_dir()


class Halves(Env):
    """Half an emoji in every text that an environment can say."""

    def make_problem(self, rng: random.Random) -> Any:
        where = rng.choice(["start", "step", "score", "state_key", "close", "reason"])
        return {"id": f"{HALF}{rng.random()}", "input": HALF, "expect": HALF, "where": where}

    def _break(self, method: str) -> None:
        if self.problem.row["where"] == method:
            raise ValueError(HALF)

    def start(self) -> str:
        self._break("start")
        return HALF

    def step(self, answer: str) -> str | None:
        self._break("step")
        return None if len(self.messages) > 4 else HALF

    def state_key(self) -> str:
        self._break("state_key")
        return HALF * (1 + 100 * (len(self.messages) % 2))  # a long one is hashed

    def score(self, answer: str) -> Any:
        self._break("score")
        return {HALF: Score(float(len(answer) % 2), True, HALF)}

    def close(self) -> None:
        self._break("close")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_that_says_halves_trains_and_every_attempt_is_recorded(tmp_path, workers):
    config = RunConfig.build(
        {
            "output_dir": str(tmp_path),
            "checkpoint.every": 1,
            "train": {"max_steps": 2, "problems_per_step": 8, "refill_limit": 0},
            "rollout": {"group_size": 2, "max_new_tokens": 40, "workers": workers},
        }
    )
    result = train_env(RunningEnv(Halves(EnvConfig(train_size=16, held_out_size=4, seed=3))), config)
    rows = [json.loads(line) for line in (result.run.path / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(row["step"] for row in rows) == {1: 16, 2: 16}
    errors = " ".join(row["error"] or "" for row in rows)
    assert all(f"{words} raised ValueError: ? lamp" in errors for words in ("reply", "scoring", "state_key", "attempt"))
    good = next(row for row in rows if row["error"] is None)
    assert good["scores"]["? lamp"]["reason"] == "? lamp"
    assert good["messages"][0]["text"] == "? lamp\n\n? lamp"
    assert "? lamp" in good["states"]
