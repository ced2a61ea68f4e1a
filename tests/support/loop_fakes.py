"""A learner, a policy and a collector of a few lines each: the loop without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.algo.batch import Batch
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Array, Group, Problem, Rollout, Score, Turn
from palestra.core.weights import Weights
from palestra.learner.base import noop
from palestra.policy.base import Policy
from palestra.train.group_source import GroupSource, ProblemSource
from palestra.train.loop import Training
from palestra.train.watcher import Watcher

PROBLEMS = [Problem(str(i), f"question {i}") for i in range(10)]
SMALL = {"train.problems_per_step": 2, "rollout.group_size": 2, "train.learning_rate": 1.0, "rollout.max_new_tokens": 8}

Calls = list[str]


@dataclass
class FakeOutputs:
    batch: Batch
    entropy: float

    def logprobs(self) -> Array:
        return np.full(len(self.batch.token_ids), -1.0, dtype=np.float32)

    def entropies(self) -> Array:
        return np.full(len(self.batch.token_ids), self.entropy, dtype=np.float32)

    def metrics(self) -> dict[str, float]:
        return {"loss": 0.5, "entropy": self.entropy, "tokens_computed": 8.0}


@dataclass
class FakeLearner:
    """Its one weight counts the optimizer steps."""

    calls: Calls
    entropy: float = 1.0
    weight: int = 0
    losses: list[StepLoss] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    on_step: Callable[[int], None] = lambda weight: None  # called before the weight changes

    def forward(self, batch: Batch, *, reference: bool = False) -> Array:
        self.calls.append("forward reference" if reference else "forward")
        return np.full(len(batch.token_ids), -2.0, dtype=np.float32)

    def forward_backward(self, batch: Batch, loss: StepLoss) -> FakeOutputs:
        self.calls.append("forward_backward")
        self.losses.append(loss)
        return FakeOutputs(batch, self.entropy)

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Callable[[], None] = noop) -> float:
        self.calls.append("optim_step")
        self.on_step(self.weight)
        host_work()
        self.rates.append(learning_rate)
        self.weight += 1
        return 1.0

    def weights(self, version: int) -> Weights:
        weight = self.weight
        return Weights(version, lambda: {"weight": weight})

    def snapshot(self, into: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"weight": torch.tensor(self.weight)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.calls.append("restore")
        self.weight = int(snapshot["weight"])

    def save(self, folder: Path) -> None:
        (folder / "weight").write_text(str(self.weight))

    def load(self, folder: Path) -> None:
        self.weight = int((folder / "weight").read_text())

    def export(self, folder: Path) -> Path:
        raise NotImplementedError


@dataclass
class FakePolicy(Policy[Any]):
    """Takes weights and says so. Nobody samples from it: the collector makes the rollouts up."""

    calls: Calls
    version: int = 0
    weight: int = 0

    def update(self, weights: Weights) -> None:
        self.version, self.weight = weights.version, weights.tensors()["weight"]
        self.calls.append(f"update {self.version}")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")


def attempt(problem: str, reward: float, *, version: int = 0, name: str = "right", error: str | None = None) -> Rollout:
    """A prompt of two tokens and an answer of three."""
    if error is not None:
        return Rollout(problem, (), (), "failed", error=error)
    turns = (Turn("template", (1, 2)), Turn("model", (3, 4, 5), (-0.5, -0.5, -0.5), version, "stop"))  # type: ignore[arg-type]
    return Rollout(problem, turns, (), "answered", scores={name: Score(reward, reward == 1.0)}, reward=reward)


@dataclass
class FakeCollector:
    """`play` gives the siblings of the problem drawn as number n; by default they differ."""

    calls: Calls
    policy: FakePolicy
    play: Callable[[int, str], Sequence[Rollout]] = lambda number, problem: [attempt(problem, r) for r in (0.0, 1.0)]
    keys: list[str] = field(default_factory=list)

    async def collect(
        self, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], on_rollout: Any = None
    ) -> list[Group]:
        await asyncio.sleep(0)
        self.calls.append(f"collect {len(problems)}")
        self.keys += seed_keys
        numbers = [int(key.rpartition("/")[2]) for key in seed_keys]
        return [
            Group(p.id, tuple(sampled_by(r, self.policy.version) for r in self.play(n, p.id)))
            for n, p in zip(numbers, problems, strict=True)
        ]

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None: ...

    def abandon(self) -> None: ...


def sampled_by(rollout: Rollout, version: int) -> Rollout:
    turns = tuple(replace(t, versions=version) if t.maker == "model" else t for t in rollout.turns)
    return replace(rollout, turns=turns)


@dataclass
class FakeTracker:
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    groups: list[tuple[int, int]] = field(default_factory=list)
    tables: dict[int, Array] = field(default_factory=dict)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self.rows.append((step, dict(row)))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.groups.append((step, len(groups)))

    def flush(self) -> None: ...

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        self.tables[step] = table()

    def close(self) -> None: ...


class Hears(Watcher):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        super().warn(text)
        self.warnings.append(text)


@dataclass
class Loop:
    """A training of fakes; `calls` has the order in which they were called."""

    training: Training
    learner: FakeLearner
    policy: FakePolicy
    collector: FakeCollector
    tracker: FakeTracker
    calls: Calls
    heard: Hears

    @property
    def rows(self) -> list[dict[str, float]]:
        return [row for _, row in self.tracker.rows]


def make_loop(
    *layers: Mapping[str, Any],
    steps: int | None = 4,
    checkpoints: Path | None = None,
    source: GroupSource | None = None,
    **collector: Any,
) -> Loop:
    config = RunConfig.build(SMALL, *layers)
    calls: Calls = []
    learner, policy = FakeLearner(calls), FakePolicy(calls)
    collects, tracker = FakeCollector(calls, policy, **collector), FakeTracker()
    source = source or ProblemSource(collects, PROBLEMS, {}, config.rollout.group_size, config.seed)
    training = Training(config, source, policy, learner, tracker, steps, checkpoints)  # type: ignore[arg-type]
    training.watcher = heard = Hears()
    return Loop(training, learner, policy, collects, tracker, calls, heard)


def ran(*layers: Mapping[str, Any], **options: Any) -> Loop:
    """A training of fakes that has ended."""
    loop = make_loop(*layers, **options)
    loop.training.run()
    return loop
