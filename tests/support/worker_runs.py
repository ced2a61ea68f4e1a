"""The source of a run whose agent loop runs in worker processes, and what it gives."""

import asyncio
import os
import random
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.types import Group, Score
from palestra.envs.env import Env
from palestra.policy.local import LocalPolicy
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher

SIZE = 3


class Sums(Env):
    """Add two numbers; the reason of a score names the process."""

    def make_problem(self, rng: random.Random) -> Any:
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        return f"What is {a} + {b}?", a + b

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def score(self, answer: str) -> Any:
        return Score(1.0, True, f"process {os.getpid()}")


class WorkerRun:
    """The source of a run with this environment, and what it gives."""

    def __init__(self, environment: Any, tiny: Any, reward_functions: Any = (), **settings: Any) -> None:
        options = {"rollout.group_size": SIZE, "rollout.max_new_tokens": 32, "rollout.workers": 2}
        options |= {"train.problems_per_step": 2}
        config = RunConfig.build(options | {name.replace("__", "."): value for name, value in settings.items()})
        self.task = EnvironmentTask(environment, reward_functions)
        self.task.start_workers(config)
        self.policy = LocalPolicy(tiny.model, tiny.tokenizer, kv_memory_gib=0.05, self_check=False)
        self.parts = Parts(config, self.policy, tiny.tokenizer, asyncio.Runner(), Watcher())
        self.source, self.evaluator = self.task.source(self.parts), self.task.evaluator(self.parts)

    @property
    def pids(self) -> list[int]:
        return [] if self.task.workers is None else self.task.workers.process_ids

    def step(self, count: int = 5) -> list[Group]:
        return self.parts.runner.run(self.source.next(count, 0))

    def prepare(self, count: int = 5) -> None:
        self.parts.runner.run(self.source.prepare(count))

    def close(self) -> None:
        self.source.close()


def tokens(groups: list[Group]) -> list[Any]:
    return [[[t.token_ids.tolist() for t in r.turns] for r in g.rollouts] for g in groups]


def pids(groups: list[Group]) -> list[set[str]]:
    return [{s.reason for r in g.rollouts for s in r.scores.values()} for g in groups]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
