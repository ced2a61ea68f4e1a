"""An environment that raises in every method, now and then: recorded failures, and the run goes on."""

import json
import random
from typing import Any

import pytest

from palestra import Env, EnvConfig
from palestra.core.config import RunConfig
from palestra.core.errors import TrainingError
from palestra.env_api import train_env
from palestra.envs.running import RunningEnv

METHODS = ("make_problem", "start", "tools", "step", "score", "close")


class Shaky(Env):
    """Raises in the method that the problem says; one problem in two says none."""

    always = False

    def make_problem(self, rng: random.Random) -> Any:
        broken = rng.choice((*METHODS, *("none",) * 6))
        self._break("make_problem", broken)
        return {"input": f"What does a red lamp cost? {rng.randint(1, 10**6)}", "expect": "1", "broken": broken}

    def start(self) -> None:
        self._break("start")

    def tools(self) -> Any:
        self._break("tools")
        return super().tools()

    def step(self, answer: str) -> None:
        self._break("step")

    def score(self, answer: str) -> Any:
        self._break("score")
        return len(answer) % 2 == 0

    def close(self) -> None:
        self._break("close")

    def _break(self, method: str, broken: str | None = None) -> None:
        if self.always or method == (broken or self.problem.row["broken"]):
            raise ValueError(f"{method} is broken")


def config(tmp_path: Any) -> RunConfig:
    return RunConfig.build(
        {
            "output_dir": str(tmp_path),
            "train": {"max_steps": 2, "problems_per_step": 12},
            "rollout": {"group_size": 2, "max_new_tokens": 40, "temperature": 1.0},
        }
    )


def test_a_shaky_environment_does_not_end_the_run(tmp_path):
    result = train_env(RunningEnv(Shaky(EnvConfig(train_size=40, held_out_size=4, seed=3))), config(tmp_path))
    assert len(result.metrics) == 2
    records = [json.loads(line) for line in (result.run.path / "rollouts.jsonl").read_text().splitlines()]
    errors = " ".join(record["error"] or "" for record in records)
    for method in ("make_problem", "start", "tools", "step", "score"):
        assert f"{method} is broken" in errors
    assert any(record["error"] is None for record in records)


def test_an_environment_in_which_everything_is_broken_is_told(tmp_path):
    env = RunningEnv(type("Broken", (Shaky,), {"always": True})())
    with pytest.raises(TrainingError, match=r"every rollout failed; the first error was .*is broken"):
        train_env(env, config(tmp_path))
