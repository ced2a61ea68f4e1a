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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.transfer import to_device
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


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample with the places in it that are predicted."""

    index: int
    sample: Sample
    scored: np.ndarray
    fed: int  # tokens that must be computed: all before the last scored one


def pack(
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    share_prefix: bool = True,
    echo: bool = False,
    rows: Collection[int] | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens each (a longer row gets one of its own).

    Rows without a scored token are left out, and those that are not among `rows`, if these are given. A group too big
    for one micro-batch is split, with its prompt computed again in each part.
    """
    batches: list[MicroBatch] = []
    open_trees: list[tuple[int, list[_Row]]] = []
    used = 0

    def close() -> None:
        nonlocal open_trees, used
        if open_trees:
            batches.append(_assemble(open_trees))
        open_trees, used = [], 0

    for prompt_length, family in _families(samples, share_prefix, echo, rows):
        whole = prompt_length + sum(row.fed - prompt_length for row in family)
        if used + whole > max_tokens >= whole:
            close()
        tree: list[_Row] = []
        for row in family:
            new = row.fed if not tree else row.fed - prompt_length
            if used and used + new > max_tokens:
                if tree:
                    open_trees.append((prompt_length, tree))
                close()
                tree, new = [], row.fed
            tree.append(row)
            used += new
        open_trees.append((prompt_length, tree))
    close()
    return batches


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


def _families(
    samples: Sequence[Sample], share_prefix: bool, echo: bool, rows: Collection[int] | None
) -> Iterator[tuple[int, list[_Row]]]:
    """(prompt length, rows) of each set of rows that may share a prompt, in order of first appearance."""
    families: dict[object, tuple[int, list[_Row]]] = {}
    for index, sample in enumerate(samples):
        row = _row(index, sample, echo) if rows is None or index in rows else None
        if row is None:
            continue
        prompt = sample.token_ids[: sample.prompt_length]
        # The prompt itself is in the key: rows that claim a shared prompt but differ stay apart.
        shared = share_prefix and 0 < len(prompt) <= row.fed
        key: object = (sample.group, prompt.tobytes()) if shared else index
        families.setdefault(key, (len(prompt) if shared else 0, []))[1].append(row)
    yield from families.values()


def _row(index: int, sample: Sample, echo: bool) -> _Row | None:
    mask = sample.policy_mask | sample.echo_mask if echo else sample.policy_mask
    scored = mask.nonzero()[0]
    if len(scored) and scored[0] == 0:
        scored = scored[1:]  # nothing predicts the first token
    return _Row(index, sample, scored, int(scored[-1])) if len(scored) else None


def _assemble(groups: list[tuple[int, list[_Row]]]) -> MicroBatch:
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    trees: list[Tree] = []
    places: list[tuple[int, int, int]] = []  # of each row: start of its tree, shared tokens, start of its own
    start = 0
    for prompt_length, rows in groups:
        shared = prompt_length if len(rows) > 1 else 0  # a lone row is one causal run
        ids.append(rows[0].sample.token_ids[:shared])
        positions.append(np.arange(shared))
        at = start + shared
        for row in rows:
            ids.append(row.sample.token_ids[shared : row.fed])
            positions.append(np.arange(shared, row.fed))
            places.append((start, shared, at))
            at += row.fed - shared
        trees.append(Tree(start, shared, tuple(row.fed - shared for row in rows if row.fed > shared)))
        start = at
    rows = [row for _, rows in groups for row in rows]
    counts = [len(row.scored) for row in rows]
    scored = np.concatenate([row.scored for row in rows])
    tree_start, shared_tokens, own_start = np.repeat(np.array(places).T, counts, axis=1)
    before = scored - 1
    source = np.where(before < shared_tokens, tree_start + before, own_start - shared_tokens + before)
    lengths = [len(row.sample.token_ids) for row in rows]
    chosen = scored + np.repeat(np.cumsum(lengths) - lengths, counts)

    def column(name: str, dtype: Any = None) -> Tensor:
        values = np.concatenate([getattr(row.sample, name) for row in rows])
        return torch.from_numpy(values[chosen].astype(dtype or values.dtype, copy=False))

    return MicroBatch(
        token_ids=_tensor(ids, np.int64),
        position_ids=_tensor(positions),
        trees=tuple(trees),
        source=torch.from_numpy(source),
        target=column("token_ids", np.int64),
        row=torch.from_numpy(np.repeat([row.index for row in rows], counts)),
        place=torch.from_numpy(scored),
        policy_mask=column("policy_mask"),
        echo_mask=column("echo_mask"),
        sampler_logprobs=column("logprobs"),
        advantages=column("advantages"),
    )


def _tensor(parts: list[np.ndarray], dtype: Any = None) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))
