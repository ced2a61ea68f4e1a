"""The one batch of the learner: the tokens of all rows end to end, as flat columns with row offsets.

`train.batch` builds it once from a step's rollouts. The update, packing, the split over ranks and token records all
read these columns; results of the learner are flat columns, too.

    >>> batch = Batch.of([Sample((1, 2, 3), (False, True, True), (False,) * 3, (0.0, -0.1, -0.2), 1.0, group=7)] * 2)
    >>> batch.rows, batch.offsets.tolist(), batch.groups.tolist(), batch.row_of([4]).tolist()
    (2, [0, 3, 6], [7, 7], [1])
    >>> batch.part(1, 2).token_ids.tolist()
    [1, 2, 3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from palestra.core.types import COLUMNS, Array, Sample

# The attributes that have an entry for each token, besides `sampled`, and for each row. Optional ones may be None.
OF_TOKENS = (
    "token_ids", "policy_mask", "echo_mask", "advantages", "old_logprobs", "ref_logprobs", "turns", "turn_rewards",
)  # fmt: skip
OF_ROWS = ("groups", "prompt_lengths", "conversations", "rewards")


def not_sampled(count: int) -> dict[str, Array]:
    """The `COLUMNS` of `count` tokens that the model did not sample."""
    return {column.name: np.full(count, column.fill, column.dtype) for column in COLUMNS}


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens to score that are not the rows' own next tokens: M of them, with the columns that a loss reads.

    A place may have several targets or none; target m of row r is predicted by the first `places[m]` tokens of the row.
    With `per_place` above 1, each run of that many targets has one place, whose logits are then computed once.
    """

    ids: Array  # [M] int64
    places: Array  # [M] int64, from 1 to the length of the row
    offsets: Array  # [R + 1] int64: the targets of row r are offsets[r] to offsets[r + 1]
    inputs: Mapping[str, Array]  # [M] float32 each
    per_place: int = 1

    def part(self, first: int, last: int) -> Targets:
        """Those of the rows from `first` to before `last`, as views."""
        chosen, offsets = slice(self.offsets[first], self.offsets[last]), self.offsets[first : last + 1]
        inputs = {name: column[chosen] for name, column in self.inputs.items()}
        return Targets(self.ids[chosen], self.places[chosen], offsets - offsets[0], inputs, self.per_place)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Batch:
    """Rows that a learner computes together. Columns have an entry for each token, or for each row.

    `policy_mask` marks the model's tokens that count in the policy loss, `echo_mask` the bodies of tool results (for
    ECHO). `logprobs` are the sampler's: 0 where the model did not sample the token, NaN where they are unknown. The
    first `prompt_lengths` tokens of rows of one group are computed once if they are equal.
    """

    token_ids: Array  # [T] int32
    policy_mask: Array  # [T] bool
    echo_mask: Array  # [T] bool
    advantages: Array  # [T] float32
    # [T] by name: `COLUMNS`, and [T, layers, k] `routing` if recorded, with the dtype's largest number for unknown ones
    sampled: dict[str, Array]
    offsets: Array  # [R + 1] int64: row r is offsets[r] to offsets[r + 1]
    groups: Array  # [R] int64
    prompt_lengths: Array  # [R] int64
    conversations: Array  # [R] int64, which of the step's conversations the row was made from
    old_logprobs: Array | None = None  # [T] the behaviour policy's; None or NaN: the current policy's own
    ref_logprobs: Array | None = None  # [T]
    targets: Targets | None = None  # None: the tokens of both masks
    rewards: Array | None = None  # [R] float64, of the row's rollout
    turns: Array | None = None  # [T] int32: which of the rollout's turns the model sampled the token in, -1: none
    turn_rewards: Array | None = None  # [T] float32: what that turn earned; the last turn has the outcome's reward

    @classmethod
    def of(cls, samples: Sequence[Sample], **columns: Sequence[Array] | None) -> Batch:
        """From single rows; more columns (`old_logprobs`, `routing`) as an array for each row."""

        def flat(name: str, kind: Any, missing: float = 0) -> Array:
            rows = (np.full(len(s.token_ids), getattr(s, name, missing), kind) for s in samples)
            return np.concatenate([np.zeros(0, kind), *rows])

        more = {name: np.concatenate(list(rows)) for name, rows in columns.items() if rows is not None}
        of_batch: dict[str, Any] = {name: more.pop(name) for name in OF_TOKENS if name in more}
        groups, prompts = (np.array([getattr(s, name) for s in samples], int) for name in ("group", "prompt_length"))
        return cls(
            token_ids=flat("token_ids", np.int32),
            policy_mask=flat("policy_mask", np.bool_),
            echo_mask=flat("echo_mask", np.bool_),
            advantages=flat("advantages", np.float32),
            sampled={c.name: flat(c.name, c.dtype, c.fill) for c in COLUMNS} | more,
            offsets=np.cumsum([0, *(len(sample.token_ids) for sample in samples)]),
            groups=groups,
            prompt_lengths=prompts,
            conversations=np.arange(len(samples)),
            **of_batch,
        )

    @classmethod
    def of_targets(cls, rows: Sequence[Array], targets: Targets, groups: Array, prompt_lengths: Array) -> Batch:
        """Rows of token ids of which the targets alone are scored."""
        token_ids = np.concatenate([np.zeros(0, np.int32), *rows], dtype=np.int32)
        masks, floats = np.zeros(len(token_ids), np.bool_), np.zeros(len(token_ids), np.float32)
        sampled, offsets = not_sampled(len(token_ids)), np.cumsum([0, *map(len, rows)])
        columns = (token_ids, masks, masks, floats, sampled, offsets)
        return cls(*columns, groups, prompt_lengths, np.arange(len(rows)), targets=targets)

    @property
    def logprobs(self) -> Array:
        """[T] float32, the sampler's."""
        return self.sampled["logprobs"]

    @property
    def versions(self) -> Array:
        """[T] int32, of the policy that sampled the token."""
        return self.sampled["versions"]

    @property
    def rows(self) -> int:
        return len(self.groups)

    @property
    def lengths(self) -> Array:
        """[R] tokens of each row."""
        return np.diff(self.offsets)

    def row_of(self, tokens: Any) -> Array:
        """The rows of these tokens, given by their places in the columns."""
        rows: Array = np.searchsorted(self.offsets, tokens, side="right") - 1
        return rows

    def part(self, first: int, last: int) -> Batch:
        """The rows from `first` to before `last`, as views."""
        tokens = slice(self.offsets[first], self.offsets[last])
        offsets = self.offsets[first : last + 1] - self.offsets[first]
        targets = None if self.targets is None else self.targets.part(first, last)
        return self._taken(tokens, slice(first, last), offsets=offsets, targets=targets)

    def select(self, rows: Array) -> Batch:
        """A copy of the rows that a [R] mask selects, without targets."""
        offsets = np.cumsum([0, *self.lengths[rows]])
        return self._taken(np.repeat(rows, self.lengths), rows, offsets=offsets, targets=None)

    def _taken(self, tokens: Any, rows: Any, **changes: Any) -> Batch:
        """The batch with these parts of its columns, by places of tokens and of rows."""
        parts = (OF_TOKENS, tokens), (OF_ROWS, rows)
        taken: dict[str, Any] = {n: x[at] for names, at in parts for n in names if (x := getattr(self, n)) is not None}
        return replace(self, sampled={name: x[tokens] for name, x in self.sampled.items()}, **taken, **changes)

    def minibatches(self, parts: int) -> list[Batch]:
        """`parts` runs of rows of nearly equal size, in order; fewer where there are fewer rows."""
        parts = min(parts, self.rows)
        bounds = (np.arange(parts + 1) * self.rows / parts).round().astype(int).tolist()
        return [self.part(first, last) for first, last in pairwise(bounds)]

    def split(self, column: Array) -> list[Array]:
        """A column of tokens as one array for each row."""
        return np.split(column, self.offsets[1:-1]) if self.rows else []

    def count(self, mask: Array) -> Array:
        """[R] how many tokens of each row a mask selects."""
        counts: Array = np.diff(np.concatenate([[0], np.cumsum(mask)])[self.offsets])
        return counts

    def predicted(self, mask: Array) -> Array:
        """The mask without the first token of each row, which nothing predicts."""
        predicted = mask.copy()
        predicted[self.offsets[:-1][self.lengths > 0]] = False
        return predicted

    def loss_lengths(self) -> tuple[Array, Array]:
        """[R] tokens of each row that count in the policy loss (targets, if there are any), and in the ECHO term."""
        if self.targets is not None:
            return np.diff(self.targets.offsets), np.zeros(self.rows, int)
        return self.count(self.predicted(self.policy_mask)), self.count(self.predicted(self.echo_mask))
