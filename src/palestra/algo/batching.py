"""Samples -> packed micro-batches: no padding, and a group's prompt once for all its siblings.

A micro-batch is one flat run of tokens, made of trees: a prompt, then one completion after the
other, whose positions all go on from the prompt's end.

    >>> mask = (False, False, True, True)
    >>> a = Sample((1, 2, 7, 8), mask, (False,) * 4, (0.0, 0.0, -0.1, -0.2), advantages=1.0, prompt_length=2)
    >>> b = Sample((1, 2, 9, 9), mask, (False,) * 4, (0.0, 0.0, -0.3, -0.4), advantages=-1.0, prompt_length=2)
    >>> [batch] = pack([a, b], max_tokens=64)
    >>> batch.token_ids.tolist(), batch.position_ids.tolist()
    ([1, 2, 7, 9], [0, 1, 2, 2])
    >>> batch.source.tolist(), batch.target.tolist(), batch.row.tolist()
    ([1, 2, 1, 3], [7, 8, 9, 9], [0, 0, 1, 1])

The last token of a row is only ever predicted, so it is not fed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.machine import to_device
from palestra.core.types import Sample


@dataclass(frozen=True, slots=True)
class Tree:
    """Where one prompt and its completions lie in the packed run: `start`, then prompt, then each completion."""

    start: int
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(self.completion_lengths)

    @property
    def is_shared(self) -> bool:
        """Whether completions look at a prompt that is not theirs alone."""
        return self.prompt_length > 0 and bool(self.completion_lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward: T packed tokens, of which N scored ones are predicted."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    trees: tuple[Tree, ...]
    source: Tensor  # [N] the packed place whose hidden state predicts the scored token
    target: Tensor  # [N] the scored token
    row: Tensor  # [N] which sample it belongs to, as an index into what was packed
    place: Tensor  # [N] where it stands in that sample
    policy_mask: Tensor  # [N] bool: counts in the policy loss
    echo_mask: Tensor  # [N] bool: counts in the ECHO term
    sampler_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32

    def to(self, device: torch.device) -> MicroBatch:
        """The same, with its tensors on a device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "trees"}
        return MicroBatch(trees=self.trees, **dict(zip(tensors, to_device(tensors.values(), device), strict=True)))


class _Rows:
    """All samples in one run of tokens, with those that are predicted: numpy's calls cost more than what they do."""

    def __init__(self, samples: Sequence[Sample], echo: bool) -> None:
        self.samples = samples
        lengths = np.array([len(sample.token_ids) for sample in samples])
        self.starts = np.cumsum(lengths) - lengths  # [R] where each sample begins
        masks = self.column("policy_mask") | self.column("echo_mask") if echo else self.column("policy_mask").copy()
        masks[self.starts[lengths > 0]] = False  # nothing predicts the first token
        self.scored = masks.nonzero()[0]  # [M] places in the run
        ends = np.searchsorted(self.scored, self.starts + lengths)
        self.counts = np.diff(ends, prepend=0)  # [R] scored tokens of each sample
        self.first = ends - self.counts  # [R] where they begin among all
        last = self.scored[np.maximum(ends, 1) - 1] if len(self.scored) else ends
        # [R] tokens that must be computed: all before the last scored one
        self.fed: list[int] = np.where(self.counts > 0, last - self.starts, 0).tolist()

    def column(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(sample, name) for sample in self.samples])


_Trees = list[tuple[int, list[int]]]  # (prompt length, rows) of each


def pack(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    share_prefix: bool = True,
    echo: bool = False,
    rows: Collection[int] | None = None,
    evenly: bool = False,
    at_least: int = 1,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens each (a longer row gets one of its own).

    Rows without a scored token are left out, and those that are not among `rows`, if these are given. A group too big
    for one micro-batch is split, with its prompt computed again in each part. `evenly`: as many micro-batches, but of
    nearly the same size, since the largest one needs the memory; and `at_least` so many, where there are enough groups.
    """
    if not samples:
        return []
    every = _Rows(samples, echo)
    families = list(_families(every, share_prefix, rows))
    if evenly:
        max_tokens = _even_limit([_tokens(every, *family) for family in families], max_tokens, at_least)
    return _assemble(every, _divide(every, families, max_tokens))


def _divide(every: _Rows, families: _Trees, max_tokens: int) -> list[_Trees]:
    """The trees of each micro-batch."""
    batches: list[_Trees] = [[]]
    used = 0

    def close() -> None:
        nonlocal used
        batches.append([])
        used = 0

    for prompt_length, family in families:
        whole = _tokens(every, prompt_length, family)
        if used + whole > max_tokens >= whole:
            close()
        tree: list[int] = []
        for row in family:
            new = every.fed[row] if not tree else every.fed[row] - prompt_length
            if used and used + new > max_tokens:
                if tree:
                    batches[-1].append((prompt_length, tree))
                close()
                tree, new = [], every.fed[row]
            tree.append(row)
            used += new
        batches[-1].append((prompt_length, tree))
    return [trees for trees in batches if trees]


def _tokens(every: _Rows, prompt_length: int, family: list[int]) -> int:
    return prompt_length + sum(every.fed[row] - prompt_length for row in family)


def _even_limit(sizes: Sequence[int], limit: int, at_least: int = 1) -> int:
    """A lower limit by which runs of these sizes, as they come, make as many micro-batches, or `at_least` so many.

    >>> _even_limit([3] * 7, 12), _even_limit([3] * 7, 100), _even_limit([13, 2, 2], 12)
    (12, 21, 12)
    >>> _even_limit([3] * 10, 27), _even_limit([3] * 10, 27, at_least=4)
    (15, 9)
    """

    def batches(limit: int) -> int:
        count, used = 1, 0
        for size in sizes:
            if used and used + size > limit:
                count, used = count + 1, 0
            used += size
        return count

    largest = max(sizes, default=0)
    if largest > limit:  # one that is split fills them anyway
        return limit
    count = max(batches(limit), at_least)
    share = -(-sum(sizes) // count)
    tried = (max(largest, share + largest * eighth // 8) for eighth in range(9))
    return next((lower for lower in tried if lower <= limit and batches(lower) <= count), limit)


def nothing_scored() -> MicroBatch:
    """A pass over two tokens of which none is scored: its gradient is 0 for every weight."""
    none, ids = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    return MicroBatch(
        token_ids=ids,
        position_ids=torch.arange(2),
        trees=(Tree(0, 0, (2,)),),
        source=none,
        target=none,
        row=none,
        place=none,
        policy_mask=none.bool(),
        echo_mask=none.bool(),
        sampler_logprobs=none.float(),
        advantages=none.float(),
    )


def split_minibatches(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The samples in `parts` runs of nearly equal size, in order; fewer where there are fewer samples."""
    parts = min(parts, len(samples))
    bounds = [round(i * len(samples) / parts) for i in range(parts + 1)]
    return [list(samples[a:b]) for a, b in pairwise(bounds)]


def _families(every: _Rows, share_prefix: bool, rows: Collection[int] | None) -> Iterator[tuple[int, list[int]]]:
    """(prompt length, rows) of each set of rows that may share a prompt, in order of first appearance."""
    families: dict[object, tuple[int, list[int]]] = {}
    for index, (sample, fed) in enumerate(zip(every.samples, every.fed, strict=True)):
        if not fed or (rows is not None and index not in rows):
            continue
        prompt = sample.token_ids[: sample.prompt_length]
        # The prompt itself is in the key: rows that claim a shared prompt but differ stay apart.
        shared = share_prefix and 0 < len(prompt) <= fed
        key: object = (sample.group, prompt.tobytes()) if shared else index
        families.setdefault(key, (len(prompt) if shared else 0, []))[1].append(index)
    yield from families.values()


def _assemble(every: _Rows, batches: Sequence[_Trees]) -> list[MicroBatch]:
    names = ("token_ids", "policy_mask", "echo_mask", "logprobs", "advantages")
    columns = {name: every.column(name) for name in names}
    return [_micro_batch(every, columns, trees) for trees in batches]


def _micro_batch(every: _Rows, columns: Mapping[str, np.ndarray], groups: _Trees) -> MicroBatch:
    trees: list[Tree] = []
    runs: list[tuple[int, int, int]] = []  # what is computed: a row, and from where to where in it
    places: list[tuple[int, int, int]] = []  # of each row: start of its tree, shared tokens, start of its own
    start = 0
    for prompt_length, rows in groups:
        shared = prompt_length if len(rows) > 1 else 0  # a lone row is one causal run
        runs.append((rows[0], 0, shared))
        at = start + shared
        for row in rows:
            runs.append((row, shared, every.fed[row]))
            places.append((start, shared, at))
            at += every.fed[row] - shared
        own = (every.fed[row] - shared for row in rows)
        trees.append(Tree(start, shared, tuple(length for length in own if length)))
        start = at
    row_of_run, first, last = np.array(runs).T
    positions = ragged_arange(first, last - first)
    ids = columns["token_ids"][positions + np.repeat(every.starts[row_of_run], last - first)]
    index = np.array([row for _, rows in groups for row in rows])
    counts = every.counts[index]
    scored = every.scored[ragged_arange(every.first[index], counts)]
    place = scored - np.repeat(every.starts[index], counts)
    tree_start, shared_tokens, own_start = np.repeat(np.array(places).T, counts, axis=1)
    before = place - 1

    def column(name: str, dtype: Any) -> Tensor:
        return torch.from_numpy(columns[name][scored].astype(dtype, copy=False))

    return MicroBatch(
        token_ids=torch.from_numpy(ids.astype(np.int64)),
        position_ids=torch.from_numpy(positions),
        trees=tuple(trees),
        source=torch.from_numpy(np.where(before < shared_tokens, tree_start, own_start - shared_tokens) + before),
        target=column("token_ids", np.int64),
        row=torch.from_numpy(np.repeat(index, counts)),
        place=torch.from_numpy(place),
        policy_mask=column("policy_mask", np.bool_),
        echo_mask=column("echo_mask", np.bool_),
        sampler_logprobs=column("logprobs", np.float32),
        advantages=column("advantages", np.float32),
    )


def ragged_arange(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """
    >>> ragged_arange(np.array([5, 0, 7]), np.array([3, 2, 1])).tolist()
    [5, 6, 7, 0, 1, 7]
    """
    ends = np.cumsum(lengths)
    return np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)
