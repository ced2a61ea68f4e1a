"""Batch -> packed micro-batches: no padding, and a group's prompt once for all its siblings.

A micro-batch is one flat run of tokens, made of trees: a prompt, then one completion after the other. The positions of
every completion continue from the end of the prompt. If all rows of a batch begin alike (system prompt, tool schemas,
examples), this common beginning is the root: it comes first in each micro-batch, and the trees hold what follows it.

    >>> from palestra.core.types import Sample
    >>> mask = (False, False, True, True)
    >>> a = Sample((1, 2, 7, 8), mask, (False,) * 4, (0.0, 0.0, -0.1, -0.2), advantages=1.0, prompt_length=2)
    >>> b = Sample((1, 2, 9, 9), mask, (False,) * 4, (0.0, 0.0, -0.3, -0.4), advantages=-1.0, prompt_length=2)
    >>> [batch] = pack(Batch.of([a, b]), max_tokens=64)
    >>> batch.token_ids.tolist(), batch.position_ids.tolist()
    ([1, 2, 7, 9], [0, 1, 2, 2])
    >>> batch.source.tolist(), batch.target.tolist(), batch.row.tolist()
    ([1, 2, 1, 3], [7, 8, 9, 9], [0, 0, 1, 1])

The last token of a row is only ever predicted, so it is not fed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.core.machine import in_one_order, to_device
from palestra.core.types import COLUMNS

LOSS_COLUMNS = tuple(column.name for column in COLUMNS if column.in_loss)


class Run(NamedTuple):
    """Tokens start..start + length of the packed ones; `past` is the number of the run whose state they continue."""

    start: int
    length: int
    past: int = -1


@dataclass(frozen=True, slots=True)
class Tree:
    """Where one prompt and its completions lie in the packed run: `start`, then prompt, then each completion.

    The tokens of the micro-batch's root are not counted.
    """

    start: int
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(self.completion_lengths)

    @property
    def runs(self) -> list[Run]:
        """The prompt, if there is one, and each completion."""
        lengths = list(filter(None, (self.prompt_length, *self.completion_lengths)))
        return list(map(Run, accumulate(lengths, initial=self.start), lengths))

    @property
    def is_shared(self) -> bool:
        """Whether completions look at a prompt that is not theirs alone."""
        return self.prompt_length > 0 and bool(self.completion_lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward: T packed tokens, of which S are scored, for a loss over N tokens.

    S is N, unless the same target is scored for several rows that share a prompt (`each`). With k candidate tokens at
    each place `target` is [S, k], and the tokens of the loss are the S · k candidates, place after place.
    """

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    trees: tuple[Tree, ...]
    source: Tensor  # [S] the packed place whose hidden state predicts the scored token
    target: Tensor  # [S] the scored token, or [S, k] candidates
    each: Tensor | None  # [N] which of the scored tokens each token of the loss is; None: the same
    row: Tensor  # [N] the row of the batch
    policy: Tensor  # indices of those of the N that count in the policy loss
    echo: Tensor  # indices of those that count in the ECHO term
    inputs: dict[str, Tensor]  # [N] float32: the columns that a loss reads, by name
    at: np.ndarray  # [N] on the host: where each token stands in the batch's columns (or among its targets)
    routing: Tensor | None = None  # [T, layers, k] the sampler's experts, as in the batch
    root: int = 0  # the first tokens, with which the rows of all trees begin
    layout: Any = None  # of the trees on the device, as a learner's layers need it

    def to(self, device: torch.device) -> MicroBatch:
        """The same, with its tensors on a device, in one transfer."""
        names = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        moved = to_device([*attrgetter(*names)(self), *self.inputs.values()], device)
        tensors: dict[str, Any] = dict(zip(names, moved, strict=False))
        return replace(self, **tensors, inputs=dict(zip(self.inputs, moved[len(names) :], strict=True)))

    def of_each(self, values: Tensor) -> Tensor:
        """[S] values of the scored tokens -> [N] of the tokens of the loss."""
        return values if self.each is None else take_rows(values, self.each)


def tokens_to_column(parts: Iterable[tuple[MicroBatch, Tensor]], batch: Batch) -> np.ndarray:
    """A column of the batch's tokens (or targets) out of values at scored tokens; NaN elsewhere."""
    size = len(batch.token_ids) if batch.targets is None else len(batch.targets.ids)
    column = np.full(size, np.nan, dtype=np.float32)
    for micro, values in parts:
        column[micro.at] = values.detach().float().cpu().numpy()
    return column


class _Scored:
    """The tokens of a batch that are scored, row after row, and what must be computed for them."""

    def __init__(self, batch: Batch, echo: bool) -> None:
        self.batch, self.echo = batch, echo
        self.starts = batch.offsets[:-1]
        if batch.targets is None:
            mask = batch.policy_mask | batch.echo_mask if echo else batch.policy_mask
            self.at = batch.predicted(mask).nonzero()[0]  # [M] places in the columns
            ends = np.searchsorted(self.at, batch.offsets[1:])
            self.counts = np.diff(ends, prepend=0)  # [R] scored tokens of each row
            self.place = self.at - np.repeat(self.starts, self.counts)  # [M] places in the row
            self.target = batch.token_ids[self.at]
            first = self.place[np.minimum(ends - self.counts, len(self.at) - 1)] if len(self.at) else ends
            last = self.place[np.maximum(ends, 1) - 1] if len(self.at) else ends
        else:
            targets = batch.targets
            self.at, self.place, self.target = np.arange(len(targets.ids)), targets.places, targets.ids
            self.counts, ends = np.diff(targets.offsets), targets.offsets[1:]
            of_rows = np.split(targets.places, ends[:-1])
            first = np.array([part.min() if len(part) else 0 for part in of_rows], dtype=int)
            last = np.array([part.max(initial=0) for part in of_rows], dtype=int)
        self.first = ends - self.counts  # [R] where they begin among all
        # [R] tokens that must be computed: all before the last scored one
        self.fed: list[int] = np.where(self.counts > 0, last, 0).tolist()
        # [R] tokens from which nothing is predicted that is scored: all before the one that predicts the first
        self.unread: list[int] = np.where(self.counts > 0, first - 1, 0).tolist()


_Trees = list[tuple[int, list[int]]]  # (prompt length, rows) of each


def pack(
    batch: Batch,
    *,
    max_tokens: int,
    max_rows: int | None = None,
    share_prefix: bool = True,
    echo: bool = False,
    rows: Collection[int] | None = None,
    evenly: bool = False,
    at_least: int = 1,
    min_root: int = 0,
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` packed tokens (a longer row gets its own) and `max_rows` rows.

    Rows without a scored token are left out; `rows` selects from the others. A group too large for one micro-batch is
    split, and its prompt computed again in each part. `evenly` keeps the number of micro-batches and makes their sizes
    nearly equal, since the largest one determines the memory; `at_least` asks for more of them. A common beginning of
    all rows becomes the root of each micro-batch with several trees if it has at least `min_root` tokens (0: no root).
    """
    if not batch.rows:
        return []
    scored = _Scored(batch, echo)
    families = list(_families(scored, share_prefix, rows))
    root = _common_beginning(scored, families) if min_root and len(families) > 1 else 0
    if root < min_root or root > max_tokens // 2:
        root = 0
    limit = max_tokens - root
    if evenly:
        limit = _even_limit([_tokens(scored, root, *family) for family in families], limit, at_least)
    batches: list[_Trees] = [[]]
    used = count = 0

    def close() -> None:
        nonlocal used, count
        batches.append([])
        used = count = 0

    for prompt_length, family in families:
        whole = _tokens(scored, root, prompt_length, family)
        shared = max(prompt_length, root)
        if used + whole > limit >= whole:
            close()
        tree: list[int] = []
        for row in family:
            new = scored.fed[row] - (shared if tree else root)
            if used and (used + new > limit or count == (max_rows or batch.rows)):
                if tree:
                    batches[-1].append((prompt_length, tree))
                close()
                tree, new = [], scored.fed[row] - root
            tree.append(row)
            used += new
            count += 1
        batches[-1].append((prompt_length, tree))
    return [_micro_batch(scored, root if len(trees) > 1 else 0, trees) for trees in batches if trees]


def _common_beginning(scored: _Scored, families: _Trees) -> int:
    """How many tokens all rows begin with, of those from which nothing is predicted that is scored."""
    tokens, starts = scored.batch.token_ids, scored.starts.tolist()
    length = min(min(map(scored.unread.__getitem__, family)) for _, family in families)
    first = starts[families[0][1][0]]
    for prompt, family in families:
        # Siblings have the same prompt: if it is long enough, one of them is compared.
        for row in family if prompt < length else family[:1]:
            differ = tokens[starts[row] : starts[row] + length] != tokens[first : first + length]
            if differ.any():
                length = int(differ.argmax())
    # No prompt has a single token behind it: recurrent layers update a state in place then, past autograd.
    behind = {prompt for prompt, family in families if len(family) > 1}
    while length + 1 in behind:
        length -= 1
    return max(length, 0)


def _tokens(scored: _Scored, root: int, prompt_length: int, family: list[int]) -> int:
    """The tokens of a tree behind the root."""
    shared = max(prompt_length, root)
    return shared - root + sum(map(scored.fed.__getitem__, family)) - shared * len(family)


def _even_limit(sizes: Sequence[int], limit: int, at_least: int = 1) -> int:
    """A lower limit that divides runs of these sizes, in their order, into as many micro-batches, or into `at_least`.

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
    for eighth in range(9):
        lower = max(largest, share + largest * eighth // 8)
        if lower <= limit and batches(lower) <= count:
            return lower
    return limit


def nothing_scored() -> MicroBatch:
    """A pass over two tokens of which none is scored: its gradient is 0 for every weight."""
    none, ids = torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    return MicroBatch(
        token_ids=ids,
        position_ids=torch.arange(2),
        trees=(Tree(0, 0, (2,)),),
        source=none,
        target=none,
        each=None,
        row=none,
        policy=none,
        echo=none,
        inputs={name: none.float() for name in (*LOSS_COLUMNS, "advantages")},
        at=none.numpy(),
    )


def _families(scored: _Scored, share_prefix: bool, rows: Collection[int] | None) -> Iterator[tuple[int, list[int]]]:
    """(prompt length, rows) of each set of rows that may share a prompt, in order of first appearance."""
    families: dict[object, tuple[int, list[int]]] = {}
    batch = scored.batch
    columns = zip(scored.fed, batch.groups.tolist(), batch.prompt_lengths.tolist(), scored.starts.tolist(), strict=True)
    for index, (fed, group, length, start) in enumerate(columns):
        if not fed or (rows is not None and index not in rows):
            continue
        # The prompt itself is in the key: rows that claim a shared prompt but differ stay apart.
        shared = share_prefix and 0 < length <= fed
        key: object = (group, batch.token_ids[start : start + length].tobytes()) if shared else index
        families.setdefault(key, (length if shared else 0, []))[1].append(index)
    yield from families.values()


def _micro_batch(scored: _Scored, root: int, groups: _Trees) -> MicroBatch:
    trees: list[Tree] = []
    # What is computed: a row, and from where to where in it.
    runs: list[tuple[int, int, int]] = [(groups[0][1][0], 0, root)]
    # Of each row: where it would begin if its tree held the root, tokens shared with others, start of its own.
    places: list[tuple[int, int, int]] = []
    index: list[int] = []
    start = root
    for prompt_length, rows in groups:
        index += rows
        shared = max(prompt_length if len(rows) > 1 else 0, root)  # a lone row is one causal run
        runs.append((rows[0], root, shared))
        own_start = start + shared - root
        lengths: list[int] = []
        for row in rows:
            runs.append((row, shared, scored.fed[row]))
            places.append((start - root, shared, own_start))
            lengths.append(scored.fed[row] - shared)
            own_start += lengths[-1]
        trees.append(Tree(start, shared - root, tuple(filter(None, lengths))))
        start = own_start
    row_of_run, first, last = np.array(runs).T
    positions = ragged_arange(first, last - first)
    flat = positions + np.repeat(scored.starts[row_of_run], last - first)
    recorded = scored.batch.sampled.get("routing")
    counts = scored.counts[index]
    chosen = ragged_arange(scored.first[index], counts)
    tree_start, shared_tokens, own_starts = np.repeat(np.array(places).T, counts, axis=1)
    before = scored.place[chosen] - 1
    source = np.where(before < shared_tokens, tree_start, own_starts - shared_tokens) + before
    target, at = scored.target[chosen].astype(np.int64), scored.at[chosen]
    return MicroBatch(
        token_ids=torch.from_numpy(scored.batch.token_ids[flat].astype(np.int64)),
        position_ids=torch.from_numpy(positions),
        routing=None if recorded is None else torch.from_numpy(recorded[flat]),
        root=root,
        trees=tuple(trees),
        row=torch.from_numpy(np.repeat(index, counts)),
        at=at,
        **_scored_tokens(scored, source, target, at, in_prompt=before < shared_tokens - 1),
    )


def _scored_tokens(
    scored: _Scored, source: np.ndarray, target: np.ndarray, at: np.ndarray, in_prompt: np.ndarray
) -> dict[str, Any]:
    """The columns of a micro-batch's scored tokens. A target inside of a shared prompt is scored for one row alone."""
    each, batch = None, scored.batch
    if batch.targets is None:
        inputs = {name: batch.sampled[name] for name in LOSS_COLUMNS} | {"advantages": batch.advantages}
        policy = np.flatnonzero(batch.policy_mask[at])
        echo = np.flatnonzero(batch.echo_mask[at]) if scored.echo else policy[:0]
    else:
        inputs = dict(batch.targets.inputs)
        policy, echo = np.arange(len(at)), np.arange(0)
        if (per_place := batch.targets.per_place) > 1:
            source, target = source[::per_place].copy(), target.reshape(-1, per_place)
        elif in_prompt.any():
            numbers = np.arange(len(at))
            keys = np.where(in_prompt, source * (int(target.max()) + 1) + target, -1 - numbers)
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            kept = np.sort(first)  # in the order of the rows
            each = np.searchsorted(kept, first)[inverse]
            source, target = source[kept], target[kept]
    columns = {name: torch.from_numpy(column[at].astype(np.float32, copy=False)) for name, column in inputs.items()}
    return {
        "source": torch.from_numpy(source),
        "target": torch.from_numpy(target),
        "policy": torch.from_numpy(policy),
        "echo": torch.from_numpy(echo),
        "inputs": columns,
        "each": None if each is None else torch.from_numpy(each),
    }


def ragged_arange(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """
    >>> ragged_arange(np.array([5, 0, 7]), np.array([3, 2, 1])).tolist()
    [5, 6, 7, 0, 1, 7]
    """
    ends = np.cumsum(lengths)
    return np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of [T, …]. Siblings read the last state of their prompt, and its gradients are added in one order."""
    taken: Tensor = _TakeRows.apply(x, rows)
    return taken


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [rows] = ctx.saved_tensors
        with in_one_order(rows):
            return grads[0].new_zeros(ctx.shape).index_add_(0, rows, grads[0]), None
