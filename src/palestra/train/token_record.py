"""The per-token results of a step, for the records: tokens/step-000050.npy of a run folder.

One row for each token of the step's rollouts, in the order of rollouts.jsonl, each rollout's turns end to end
(those of its other conversations after its own). A structured array, so that the rows of one rollout are one read:

    >>> table = np.load("runs/…/tokens/step-000050.npy", mmap_mode="r")            # doctest: +SKIP
    >>> table["entropy"][table["policy_mask"]].mean()
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from palestra.algo.batch import Batch
from palestra.core.types import Array, Group
from palestra.learner.base import Outputs
from palestra.train.batch import TurnColumns, conversations_of

LEARNED = ("learner_logprob", "ratio", "entropy")

TOKEN_COLUMNS = np.dtype(
    [
        ("policy_mask", "?"),  # trained in the policy loss
        ("logprob", "<f4"),  # the sampler's; NaN where the model did not make the token, as below
        ("learner_logprob", "<f4"),  # before the step's first update of it; NaN where nothing was learned
        ("ratio", "<f4"),  # of the last update: new policy over old
        ("entropy", "<f4"),  # of the learner's distribution
        ("advantage", "<f4"),
    ]
)


class TokenRecord:
    """Collects the learner's per-token results of one step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._columns = {name: np.full(len(batch.token_ids), np.nan, np.float32) for name in LEARNED}
        self._added: set[int] = set()

    def add(self, first_row: int, batch: Batch, outputs: Outputs) -> None:
        """The results of one forward_backward on rows from `first_row` on; of several passes, the last ratio counts."""
        start = int(self._batch.offsets[first_row])
        tokens = slice(start, start + len(batch.token_ids))
        now = outputs.logprobs()
        before = now if batch.old_logprobs is None else batch.old_logprobs
        self._columns["ratio"][tokens] = np.exp(now - np.where(np.isnan(before), now, before))
        if start not in self._added:
            self._added.add(start)
            self._columns["learner_logprob"][tokens] = now
            self._columns["entropy"][tokens] = outputs.entropies()

    def table(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Array:
        """[T] `TOKEN_COLUMNS` of all tokens of the step, trained or not."""
        conversations = conversations_of(groups, advantages)
        columns = TurnColumns.of(conversations)
        table = np.zeros(len(columns.token_ids), TOKEN_COLUMNS)
        table["logprob"] = np.where(columns.by_model, columns.logprobs, np.nan)
        table["advantage"] = np.where(columns.by_model, columns.advantages, np.nan)
        is_row = np.zeros(len(conversations), np.bool_)
        is_row[self._batch.conversations] = True
        places, mask = np.repeat(is_row, columns.lengths), self._batch.policy_mask
        table["policy_mask"][places] = mask
        for name in LEARNED:
            table[name] = np.nan
            table[name][places] = np.where(mask, self._columns[name], np.nan)
        return table
