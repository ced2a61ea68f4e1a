"""The safety net of a run: notice from the step metrics that the model collapses, and go back to weights that worked.

`Health` is part of the checkpoint, so a resumed run judges like one that was never interrupted. `Snapshots` keeps two
copies of the trained weights in the memory of the host: 2 x 2 bytes per trained weight in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.core.types import Group
from palestra.learner.local import LocalLearner

WINDOW = 4  # steps whose metrics are averaged
SNAPSHOT_EVERY = 5  # fewest steps between two snapshots of the best weights
RATE_FACTOR = 0.3  # of the learning rate, after each rollback
BEST_FILE = "best_weights.pt"  # in a checkpoint
_ERRORS_APART = 4.0  # standard errors by which the newest reward must be below the best
_LEAST_FALL = 0.3  # of the best reward
_LOW_PASS_RATE = 0.1  # above it, a change of behaviour at the same reward is not a collapse
_CUT_OFF_RISE = 0.4
_SHRUNK = 0.2  # of the first lengths
_LOST_CALLS = 0.1  # of the first tool calls
_METRICS = (
    "reward_mean", "reward_std", "groups", "pass_rate", "entropy", "truncation_rate", "looping_rate",
    "completion_length_mean", "tool_calls_mean",
)  # fmt: skip

Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Level:
    """A mean reward and its standard error. Siblings are alike, so a group counts as one observation."""

    reward: float
    error: float

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Level:
        variance = sum(row["reward_std"] ** 2 / max(1.0, row["groups"]) for row in rows) / len(rows) ** 2
        return cls(sum(row["reward_mean"] for row in rows) / len(rows), math.sqrt(variance))

    def exceeds(self, other: Level, errors: float) -> bool:
        return self.reward - other.reward > errors * math.hypot(self.error, other.error)


@dataclass(frozen=True, slots=True)
class Health:
    """The metrics of a run's first steps and its newest, and the best rewards in between."""

    first: tuple[Row, ...] = ()
    last: tuple[Row, ...] = ()
    best: Level | None = None

    def with_step(self, metrics: Row) -> Health:
        """Add a step; one in which every rollout failed says nothing about the model."""
        if not all(name in metrics for name in ("reward_mean", "reward_std", "groups")):
            return self
        row = {name: metrics[name] for name in _METRICS if name in metrics}
        first = self.first if len(self.first) == WINDOW else (*self.first, row)
        last = (*self.last, row)[-WINDOW:]
        level = Level.of(last) if len(last) == WINDOW else None
        best = level if level and (self.best is None or level.reward > self.best.reward) else self.best
        return Health(first, last, best)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Health:
        best = record["best"]
        return cls(tuple(record["first"]), tuple(record["last"]), Level(**best) if best else None)


NEW_RUN = Health()


@dataclass(frozen=True, slots=True)
class SafetyState:
    """What the safety net knows and has done; part of a checkpoint."""

    health: Health = NEW_RUN
    best_step: int = 0  # whose weights are the best snapshot
    best_reward: float = float("-inf")  # smoothed, or held out where eval.every is set
    restored_step: int = -1  # to which the last rollback went back; 0: the weights of the beginning
    rollbacks: int = 0
    rate_factor: float = 1.0  # of the learning rate
    events: tuple[str, ...] = ()  # one sentence for each rollback

    def new_best(self, step: int, groups: Sequence[Group]) -> float | None:
        """The mean reward of the newest steps and of these groups, if it is the best so far.

        None while there are too few steps, or if the last snapshot is too new.
        """
        newest = self.health.last[-(WINDOW - 1) :]
        if len(newest) < WINDOW - 1 or (self.best_step and step - self.best_step < SNAPSHOT_EVERY):
            return None
        rewards = [r.reward for group in groups for r in group.rollouts if r.error is None]
        smoothed = sum([*(row["reward_mean"] for row in newest), sum(rewards) / len(rewards)]) / WINDOW
        return smoothed if smoothed > self.best_reward else None

    def rolled_back(self, step: int, reason: str, most: int, has_best: bool) -> tuple[str | None, SafetyState]:
        """The reason to end the run, if `most` rollbacks were made before, and the state after going back.

        After a second collapse from the same weights, the target is the initial weights.
        """
        target = self.best_step if has_best and self.restored_step != self.best_step else 0
        factor, is_end = self.rate_factor * RATE_FACTOR, self.rollbacks >= most
        place = f"step {target}" if target else "the beginning"
        then = f", and ended early after {most} rollbacks" if is_end else f" with {factor:.2g} of its learning rate"
        event = f"step {step}: {reason.rstrip('.')}; the run went back to the weights of {place}{then}"
        after = replace(
            self,
            health=replace(self.health, last=()),  # the weights of the newest steps are discarded
            restored_step=target,
            rollbacks=self.rollbacks + (not is_end),
            rate_factor=factor,
            events=(*self.events, event),
        )
        return event if is_end else None, after

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> SafetyState:
        own = {"health": Health.from_dict(record["health"]), "events": tuple(record["events"])}
        return cls(**dict(record) | own)


UNTOUCHED = SafetyState()


def collapse_reason(health: Health) -> str | None:
    """Why the model has collapsed, as the first half of a sentence; None if it has not."""
    if len(health.first) < WINDOW or len(health.last) < WINDOW or health.best is None:
        return None
    start, now, best = Level.of(health.first), Level.of(health.last), health.best
    if best.exceeds(now, _ERRORS_APART) and best.reward - now.reward > _LEAST_FALL * abs(best.reward):
        return f"the mean reward fell from {best.reward:.3g} to {now.reward:.3g}"
    has_fallen = start.exceeds(now, 2.0)
    pass_rate = _mean(health.last, "pass_rate")
    earns_enough = pass_rate is not None and pass_rate >= _LOW_PASS_RATE
    if now.exceeds(start, 2.0) or (earns_enough and not has_fallen):
        return None
    return next(_signs(health), None)


def _signs(health: Health) -> Iterator[str]:
    """Signs of a collapse: changes of behaviour without a gain in reward."""

    def means(name: str) -> tuple[float, float] | None:
        before, after = _mean(health.first, name), _mean(health.last, name)
        return None if before is None or after is None else (before, after)

    gain = "without a gain in reward"
    if (rates := means("truncation_rate")) and rates[1] - rates[0] > _CUT_OFF_RISE:
        looping = (means("looping_rate") or (0.0, 0.0))[1]
        text = f" ({looping:.0%} repeat themselves)" if looping > 0.1 else ""
        yield f"rollouts that are cut off rose from {rates[0]:.0%} to {rates[1]:.0%}{text} {gain}"
    if (lengths := means("completion_length_mean")) and lengths[1] < _SHRUNK * lengths[0]:
        yield f"completions shrank from {lengths[0]:.0f} to {lengths[1]:.0f} tokens {gain}"
    if (calls := means("tool_calls_mean")) and calls[0] >= 0.5 and calls[1] < _LOST_CALLS * calls[0]:
        yield f"tool calls fell from {calls[0]:.2g} to {calls[1]:.2g} a rollout {gain}"
    if entropies := means("entropy"):
        before, after = entropies
        if after > max(4 * before, before + 1.0) or after < 0.02 * before:
            yield f"the entropy went from {before:.2g} to {after:.2g} nats a token {gain}"


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


class Snapshots:
    """Copies of the weights that a learner trains, in the memory of the host."""

    def __init__(self, learner: LocalLearner) -> None:
        self._learner = learner
        self._initial = learner.snapshot()
        self._best: dict[str, Tensor] | None = None

    @property
    def has_best(self) -> bool:
        return self._best is not None

    def take_best(self) -> None:
        """Copy the current weights as the best."""
        self._best = self._learner.snapshot(into=self._best)

    def restore(self, *, best: bool) -> None:
        """Load the best or the initial weights."""
        chosen = self._best if best else self._initial
        assert chosen is not None
        self._learner.restore(chosen)

    def save(self, folder: Path) -> None:
        """Write the best weights to a checkpoint. The initial weights are loaded with the model."""
        if self._best is not None:
            torch.save(self._best, folder / BEST_FILE)

    def load(self, folder: Path) -> None:
        path = folder / BEST_FILE
        self._best = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
