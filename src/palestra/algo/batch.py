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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from palestra.core.types import Array, Sample

TOKEN_COLUMNS = ("token_ids", "policy_mask", "echo_mask", "logprobs", "advantages", "versions")
ROW_COLUMNS = ("groups", "prompt_lengths", "conversations")
MORE_TOKEN_COLUMNS = ("old_logprobs", "ref_logprobs", "turns", "turn_rewards", "routing")


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
    logprobs: Array  # [T] float32
    advantages: Array  # [T] float32
    versions: Array  # [T] int32, of the policy that sampled the token
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
    routing: Array | None = None  # [T, layers, k] the sampler's experts; the dtype's largest number: unknown

    @classmethod
    def of(cls, samples: Sequence[Sample], **columns: Sequence[Array] | None) -> Batch:
        """From single rows; more columns (`old_logprobs`, `ref_logprobs`) as an array for each row."""
        kinds = (np.int32, np.bool_, np.bool_, np.float32, np.float32, np.int32)
        tokens: dict[str, Any] = {
            name: np.concatenate([np.zeros(0, kind), *(getattr(sample, name) for sample in samples)])
            for name, kind in zip(TOKEN_COLUMNS, kinds, strict=True)
        }
        groups, prompts = (np.array([getattr(s, name) for s in samples], int) for name in ("group", "prompt_length"))
        offsets = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
        tokens |= {name: np.concatenate(list(rows)) for name, rows in columns.items() if rows is not None}
        return cls(
            offsets=offsets, groups=groups, prompt_lengths=prompts, conversations=np.arange(len(samples)), **tokens
        )

    @classmethod
    def of_targets(cls, rows: Sequence[Array], targets: Targets, groups: Array, prompt_lengths: Array) -> Batch:
        """Rows of token ids of which the targets alone are scored."""
        token_ids = np.concatenate([np.zeros(0, np.int32), *rows], dtype=np.int32)
        masks, floats = np.zeros(len(token_ids), np.bool_), np.zeros(len(token_ids), np.float32)
        offsets, versions = np.cumsum([0, *map(len, rows)]), np.zeros(len(token_ids), np.int32)
        columns = (token_ids, masks, masks, floats, floats, versions)
        return cls(*columns, offsets, groups, prompt_lengths, np.arange(len(rows)), targets=targets)

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
        of_tokens = {name: getattr(self, name)[tokens] for name in TOKEN_COLUMNS}
        of_rows = {name: getattr(self, name)[first:last] for name in ROW_COLUMNS}
        of_rows["offsets"] = self.offsets[first : last + 1] - self.offsets[first]
        more: dict[str, Any] = {
            name: None if (x := getattr(self, name)) is None else x[tokens] for name in MORE_TOKEN_COLUMNS
        }
        targets = None if self.targets is None else self.targets.part(first, last)
        rewards = None if self.rewards is None else self.rewards[first:last]
        return Batch(**of_tokens, **of_rows, **more, targets=targets, rewards=rewards)

    def minibatches(self, parts: int) -> list[Batch]:
        """`parts` runs of rows of nearly equal size, in order; fewer where there are fewer rows."""
        parts = min(parts, self.rows)
        bounds = [round(i * self.rows / parts) for i in range(parts + 1)]
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

    def samples(self) -> Iterator[Sample]:
        """The rows one by one, as views."""
        for row, (first, last) in enumerate(pairwise(self.offsets.tolist())):
            ids, policy, echo, logprobs, advantages, versions = (
                getattr(self, name)[first:last] for name in TOKEN_COLUMNS
            )
            group, prompt = int(self.groups[row]), int(self.prompt_lengths[row])
            yield Sample(ids, policy, echo, logprobs, advantages, group, prompt, versions)
