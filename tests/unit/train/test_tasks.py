"""What a task of an environment makes of its reward functions."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from scripted import ANSWER, CALL, ScriptedEnvironment, ScriptedPolicy

from palestra.core.config import RunConfig
from palestra.core.types import Problem
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher

PROBLEMS = [Problem(str(i), "What is 2 + 3?") for i in range(3)]


class Unscored(ScriptedEnvironment):
    """Whether an attempt was good is for reward functions to say."""

    def problems(self, split: str) -> list[Problem]:
        return PROBLEMS if split == "train" else PROBLEMS[:2]

    def open(self, problem: Problem) -> Any:
        episode = super().open(problem)
        episode.score = nothing  # type: ignore[method-assign]
        return episode


async def nothing(*arguments: Any) -> dict[str, Any]:
    return {}


@pytest.fixture
def parts(tiny_tokenizer: Any) -> Parts:
    config = RunConfig.build({"rollout.group_size": 2, "train.problems_per_step": 1, "train.epochs": 4})
    policy: Any = ScriptedPolicy(tiny_tokenizer, [CALL, ANSWER], version=6)
    return Parts(config, policy, tiny_tokenizer, asyncio.Runner(), Watcher())


def test_reward_functions_know_how_far_the_training_is(parts: Parts) -> None:
    seen: list[Any] = []

    def rate(completions: list, trainer_state: Any) -> list[float]:
        seen.append(trainer_state)
        return [0.0] * len(completions)

    parts.runner.run(EnvironmentTask(Unscored(), [rate]).source(parts).next(1, 6))
    assert (seen[0].global_step, seen[0].max_steps, seen[0].epoch) == (6, 12, 2.0)


class CountsOpen(ScriptedEnvironment):
    """Ten held-out problems, and how many episodes were open at once."""

    most: int = 0

    def problems(self, split: str) -> list[Problem]:
        return [Problem(str(i), f"What is {i} + 3?") for i in range(10)]

    def open(self, problem: Problem) -> Any:
        episode = super().open(problem)
        self.most = max(self.most, sum(not other.closed for other in self.episodes))
        return episode


def test_an_evaluation_opens_no_more_episodes_at_once_than_allowed(parts: Parts) -> None:
    parts = replace(parts, config=RunConfig.build({"rollout.max_open_episodes": 3}))
    environment = CountsOpen()
    report = EnvironmentTask(environment).evaluator(parts).run(parts.runner, parts.watcher, "scoring")
    assert (report.pass_rate.n, environment.most) == (10, 3)


class AllTrained(Unscored):
    def problems(self, split: str) -> list[Problem]:
        return PROBLEMS if split == "train" else []


def test_problems_are_scored_by_the_reward_functions_and_the_report_says_whether_they_were_held_out(parts) -> None:
    functions = [lambda completions: [1.0] * len(completions)]
    for environment, split, count in ((Unscored(), "held_out", 2), (AllTrained(), "train", 3)):
        report = EnvironmentTask(environment, functions).evaluator(parts).run(parts.runner, parts.watcher, "scoring")
        assert report.to_dict()["split"] == split
        assert (report.pass_rate.rate, report.pass_rate.n, report.mean_reward) == (1.0, count, 1.0)
        assert [m.name for m in report.measures] == ["<lambda>"]
