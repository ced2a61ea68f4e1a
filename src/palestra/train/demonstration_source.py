"""Groups of demonstrations: conversations that are learned by cross-entropy, whoever had them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.files import append_jsonl, read_jsonl, write_jsonl
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Group, Rollout, Turn
from palestra.train.group_source import draw


def as_demonstration(rollout: Rollout) -> Rollout:
    """The rollout, to be imitated: an advantage of 1 for each of its tokens, whoever sampled them."""
    length = sum(len(turn.token_ids) for turn in rollout.turns)
    turns = tuple(_unsampled(turn) if turn.maker == "model" else turn for turn in rollout.turns)
    return replace(rollout, turns=turns, advantages=np.ones(length, np.float32), reward=1.0, lineages=())


def _unsampled(turn: Turn) -> Turn:
    count = len(turn.token_ids)
    return replace(turn, logprobs=np.full(count, np.nan, np.float32), versions=np.zeros(count, np.int32))


class DemonstrationStore:
    """The demonstrations of a run, in a file of its folder, in the order in which they came."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        """Read what the file has; `writes` is False for the ranks beside the first."""
        self._path = path
        self._writes = writes
        self.rollouts = [rollout_from_dict(row) for row in read_jsonl(path)] if path.is_file() else []

    def __len__(self) -> int:
        return len(self.rollouts)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        new = [rollout_from_dict(rollout_to_dict(as_demonstration(r), exact=True)) for r in rollouts]
        self.rollouts += new  # exactly what a resumed run reads
        if self._writes and new:
            append_jsonl(self._path, (rollout_to_dict(rollout, exact=True) for rollout in new))

    def cut(self, count: int) -> None:
        """Forget all but the first `count`: a resumed run makes the others again."""
        if len(self.rollouts) > count:
            del self.rollouts[count:]
            if self._writes:
                write_jsonl(self._path, (rollout_to_dict(rollout, exact=True) for rollout in self.rollouts))


@dataclass(slots=True)
class DemonstrationSource:
    """Demonstrations in an endless stream, shuffled anew each epoch; the source of an sft stage."""

    store: DemonstrationStore
    seed: int
    first: int = 0  # of the store's demonstrations, that this stage learns from
    count: int = 0  # how many there are
    drawn: int = 0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    refills: bool = False
    gives_back: bool = False
    max_staleness: int | None = None
    concurrent: int = 0
    stage: str = "sft"
    is_done: bool = False
    ends_by_itself: bool = False  # the number of steps is not known before
    metrics: dict[str, float] = field(default_factory=dict)  # of the last step

    async def next(self, count: int, version: int) -> list[Group]:
        groups = self.draw(count)
        self.metrics = {"demonstrations": float(self.count)}
        return groups

    def draw(self, count: int) -> list[Group]:
        chosen = self.store.rollouts[self.first : self.first + self.count]
        found = draw(chosen, self.drawn, min(count, len(chosen)), self.seed)
        self.drawn += len(found)
        return [Group(rollout.problem_id, (rollout,)) for rollout in found]

    def give_back(self, count: int) -> None:
        raise NotImplementedError("demonstrations are not given back")

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "count": self.count, "drawn": self.drawn, "stored": len(self.store)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.first, self.count, self.drawn = (int(state[name]) for name in ("first", "count", "drawn"))
            self.store.cut(int(state["stored"]))

    def commit(self) -> None:
        """The store's file has them."""

    def close(self) -> None: ...


def steps_for(demonstrations: int, epochs: float, batch: int) -> int:
    """Optimizer steps for so many passes.

    >>> steps_for(40, 3, 16), steps_for(5, 2, 16)
    (8, 2)
    """
    return max(1, math.ceil(epochs * demonstrations / min(batch, demonstrations)))
