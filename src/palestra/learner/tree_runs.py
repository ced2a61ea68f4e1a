"""Runs of packed tokens, which trees are made of, as padded rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Tree
from palestra.core.machine import to_device


class Run(NamedTuple):
    """Tokens start..start + length of the packed ones; `past` is the number of the run whose state they continue."""

    start: int
    length: int
    past: int = -1


def runs_of(tree: Tree) -> list[Run]:
    """The prompt, if there is one, and each completion."""
    lengths = [n for n in (tree.prompt_length, *tree.completion_lengths) if n]
    return list(map(Run, accumulate(lengths, initial=tree.start), lengths))


def of_about_one_length(runs: Iterable[Run], padding: float) -> Iterator[list[Run]]:
    """The runs in batches, up to `padding` times as long as the shortest; those that continue a state apart from those
    that do not."""
    batch: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.past < 0, run.length)):
        if batch and (run.length > padding * batch[0].length or (run.past < 0) != (batch[0].past < 0)):
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs that are computed in one call, padded to the longest of them."""

    count: int
    places: Tensor  # [count * longest] the token at each place; padding repeats a run's last
    real: Tensor | None  # which places hold a token of their own; None: all
    padding: Tensor | None  # which do not
    lengths: Tensor | None  # [count] the tokens of each; None: as many in all
    tokens: Tensor  # [tokens] those of all, one run after the other
    past: Tensor  # [count] whose states they continue; empty: they begin here

    @classmethod
    def of(cls, runs: Sequence[Run], device: torch.device, shortest: int = 1) -> Runs:
        starts, lengths, past = np.array(runs, np.int64).T
        step = np.arange(max(shortest, lengths.max()))
        places = (starts[:, None] + np.minimum(step, lengths[:, None] - 1)).reshape(-1)
        is_real = (step < lengths[:, None]).reshape(-1)
        columns = places, past[past >= 0], np.flatnonzero(is_real), np.flatnonzero(~is_real), lengths, places[is_real]
        at, continued, real, padding, n, tokens = to_device(map(torch.from_numpy, columns), device)
        if is_real.all():
            return cls(len(runs), at, None, None, None, at, continued)
        return cls(len(runs), at, real, padding, n, tokens, continued)

    def rows(self, x: Tensor, *, zeros: bool = False) -> Tensor:
        """[T, ...] -> [count, longest, ...]; `zeros`: in place of the padding."""
        padded = x.index_select(0, self.places)
        if zeros and self.padding is not None:
            padded.index_fill_(0, self.padding, 0.0)
        return padded.unflatten(0, (self.count, -1))

    def flat(self, x: Tensor) -> Tensor:
        """[count, longest, ...] -> [tokens, ...] one run after the other."""
        flat = x.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)
