"""Groups of demonstrations: conversations that are learned by cross-entropy, whoever had them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.core.files import append_jsonl, read_jsonl, write_jsonl
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Group, Rollout
from palestra.train.demonstrations import as_demonstrations
from palestra.train.group_source import draw


class DemonstrationStore:
    """The demonstrations of a run, in a file of its folder, in the order in which they came."""

    def __init__(self, path: Path) -> None:
        """Read what the file has."""
        self._path = path
        self.rollouts = [rollout_from_dict(row) for row in read_jsonl(path)] if path.is_file() else []

    def __len__(self) -> int:
        return len(self.rollouts)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        made = [each for rollout in rollouts for each in as_demonstrations(rollout)]
        new = [rollout_from_dict(rollout_to_dict(each, exact=True)) for each in made]
        self.rollouts += new  # exactly what a resumed run reads
        if new:
            append_jsonl(self._path, (rollout_to_dict(rollout, exact=True) for rollout in new))

    def cut(self, count: int) -> None:
        """Forget all but the first `count`: a resumed run makes the others again."""
        if len(self.rollouts) > count:
            del self.rollouts[count:]
            write_jsonl(self._path, (rollout_to_dict(rollout, exact=True) for rollout in self.rollouts))


@dataclass(slots=True)
class DemonstrationSource:
    """Demonstrations in an endless stream, reshuffled each epoch; the source of an sft stage."""

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

    @property
    def samples_next(self) -> bool:
        """Whether the next step samples before it learns."""
        return False

    async def next(self, count: int, version: int) -> list[Group]:
        groups = self.draw(count)
        self.metrics = {"demonstrations": float(self.count)}
        return groups

    def draw(self, count: int) -> list[Group]:
        chosen = self.store.rollouts[self.first : self.first + self.count]
        found = draw(chosen, self.drawn, min(count, len(chosen)), self.seed)
        self.drawn += len(found)
        return [Group(rollout.problem_id, (rollout,)) for rollout in found]

    def observe(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], step: int) -> None: ...

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


def sampled_key(rollout: Rollout) -> tuple[str, bytes]:
    """The problem and the tokens that the model sampled, for finding repetitions."""
    turns = (turn.token_ids.tobytes() for turn in rollout.turns if turn.maker == "model")
    return rollout.problem_id, b"|".join(turns)


def steps_for(demonstrations: int, epochs: float, batch: int) -> int:
    """Optimizer steps for this many epochs.

    >>> steps_for(40, 3, 16), steps_for(5, 2, 16)
    (8, 2)
    """
    return max(1, math.ceil(epochs * demonstrations / min(batch, demonstrations)))
