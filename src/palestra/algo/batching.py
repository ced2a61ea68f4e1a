"""Samples -> packed micro-batches: no padding, and a group's prompt once for all its siblings.

A micro-batch is one flat run of tokens, made of trees: a prompt, then one completion after the
other, whose positions all go on from the prompt's end.

    >>> a = Sample((1, 2, 7, 8), (False, False, True, True), (False,) * 4, (0.0, 0.0, -0.1, -0.2), 1.0, 0, 2)
    >>> b = Sample((1, 2, 9, 9), (False, False, True, True), (False,) * 4, (0.0, 0.0, -0.3, -0.4), -1.0, 0, 2)
    >>> [batch] = pack([a, b], max_tokens=64)
    >>> batch.token_ids.tolist(), batch.position_ids.tolist()
    ([1, 2, 7, 9], [0, 1, 2, 2])
    >>> batch.source.tolist(), batch.target.tolist(), batch.row.tolist()
    ([1, 2, 1, 3], [7, 8, 9, 9], [0, 0, 1, 1])

The last token of a row is only ever predicted, so it is not fed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

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
    trained: Tensor  # [N] bool: counts in the policy loss
    observed: Tensor  # [N] bool: counts in the ECHO term
    sampler_logprobs: Tensor  # [N] float32

    def to(self, device: torch.device) -> MicroBatch:
        """The same, with its tensors on a device: in one copy, since each costs a wait."""
        if device == self.token_ids.device:
            return self
        tensors = [getattr(self, name) for name in _TENSORS]
        together = torch.cat([x.contiguous().view(torch.uint8) for x in tensors]).to(device)
        parts = together.split([x.nbytes for x in tensors])
        moved = {name: y.view(x.dtype) for name, x, y in zip(_TENSORS, tensors, parts, strict=True)}
        return MicroBatch(trees=self.trees, **moved)


_TENSORS = (  # the widest first, so that each begins at a multiple of its size
    "token_ids",
    "position_ids",
    "source",
    "target",
    "row",
    "sampler_logprobs",
    "trained",
    "observed",
)


@dataclass(frozen=True, slots=True)
class _Row:
    index: int
    token_ids: np.ndarray
    scored: np.ndarray  # places in the row that are predicted
    targets: np.ndarray  # the tokens there
    trained: np.ndarray
    observed: np.ndarray
    logprobs: np.ndarray

    @property
    def fed(self) -> int:
        """Tokens that must be computed: all before the last scored one."""
        return int(self.scored[-1])


def pack(
    samples: Sequence[Sample], *, max_tokens: int, share_prefix: bool = True, observed: bool = False
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens each (a longer row gets one of its own).

    Rows without a scored token are left out. A group too big for one micro-batch is split, with its
    prompt computed again in each part.
    """
    batches: list[MicroBatch] = []
    open_trees: list[tuple[int, list[_Row]]] = []
    used = 0

    def close() -> None:
        nonlocal open_trees, used
        if open_trees:
            batches.append(_assemble(open_trees))
        open_trees, used = [], 0

    for prompt_length, rows in _families(samples, share_prefix, observed):
        whole = prompt_length + sum(row.fed - prompt_length for row in rows)
        if used + whole > max_tokens >= whole:
            close()
        tree: list[_Row] = []
        for row in rows:
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


def split_minibatches(samples: Sequence[Sample], parts: int) -> list[list[Sample]]:
    """The samples in `parts` runs of nearly equal size, in order; fewer where there are fewer samples."""
    parts = min(parts, len(samples))
    bounds = [round(i * len(samples) / parts) for i in range(parts + 1)]
    return [list(samples[a:b]) for a, b in pairwise(bounds)]


def _families(samples: Sequence[Sample], share_prefix: bool, observed: bool) -> Iterator[tuple[int, list[_Row]]]:
    """(prompt length, rows) of each set of rows that may share a prompt, in order of first appearance."""
    families: dict[object, tuple[int, list[_Row]]] = {}
    for index, sample in enumerate(samples):
        row = _row(index, sample, observed)
        if row is None:
            continue
        prompt = sample.token_ids[: sample.prompt_length]
        # The prompt itself is in the key: rows that claim a shared prompt but differ stay apart.
        shared = share_prefix and 0 < len(prompt) <= row.fed
        key: object = (sample.group, prompt) if shared else index
        families.setdefault(key, (len(prompt) if shared else 0, []))[1].append(row)
    yield from families.values()


def _row(index: int, sample: Sample, observed: bool) -> _Row | None:
    trained = _flags(sample.trained)
    watched = _flags(sample.observed) if observed else np.zeros(len(trained), dtype=bool)
    scored = (trained | watched).nonzero()[0]
    if len(scored) and scored[0] == 0:
        scored = scored[1:]  # nothing predicts the first token
    if not len(scored):
        return None
    ids, logprobs = _numbers(sample.token_ids, "q"), _numbers(sample.logprobs, "f")
    at = scored
    if scored[-1] - scored[0] == len(scored) - 1:  # without a gap: views instead of copies
        at = slice(scored[0], scored[-1] + 1)
    return _Row(index, ids, scored, ids[at], trained[at], watched[at], logprobs[at])


def _flags(values: Sequence[bool]) -> np.ndarray:
    return np.frombuffer(bytes(values), dtype=bool)


def _numbers(values: Sequence[float], kind: str) -> np.ndarray:
    """The quickest way from Python's numbers to NumPy's: a GPU waits for this."""
    return np.frombuffer(struct.pack(f"{len(values)}{kind}", *values), dtype=kind)


def _assemble(groups: list[tuple[int, list[_Row]]]) -> MicroBatch:
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    trees: list[Tree] = []
    start = 0
    for prompt_length, rows in groups:
        shared = prompt_length if len(rows) > 1 else 0  # a lone row is one causal run
        ids.append(rows[0].token_ids[:shared])
        positions.append(np.arange(shared))
        at = start + shared
        for row in rows:
            ids.append(row.token_ids[shared : row.fed])
            positions.append(np.arange(shared, row.fed))
            before = row.scored - 1
            own = before + (at - shared)
            sources.append(np.where(before < shared, start + before, own) if shared else own)
            at += row.fed - shared
        trees.append(Tree(start, shared, tuple(row.fed - shared for row in rows if row.fed > shared)))
        start = at
    rows = [row for _, rows in groups for row in rows]
    return MicroBatch(
        token_ids=_tensor(ids),
        position_ids=_tensor(positions),
        trees=tuple(trees),
        source=_tensor(sources),
        target=_tensor([row.targets for row in rows]),
        row=torch.from_numpy(np.repeat([row.index for row in rows], [len(row.scored) for row in rows])),
        trained=_tensor([row.trained for row in rows]),
        observed=_tensor([row.observed for row in rows]),
        sampler_logprobs=_tensor([row.logprobs for row in rows]),
    )


def _tensor(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))
