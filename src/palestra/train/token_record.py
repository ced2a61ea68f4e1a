"""What a step found for each token, for the records: tokens/step-000050.npy of a run folder.

One row for each token of the step's rollouts, in the order of rollouts.jsonl, each rollout's turns laid end to end
(those of its other conversations after its own). A structured array, so that the rows of one rollout are one read:

    >>> table = np.load("runs/…/tokens/step-000050.npy", mmap_mode="r")            # doctest: +SKIP
    >>> table["entropy"][table["policy_mask"]].mean()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from palestra.core.types import Array, Group, Rollout, Sample
from palestra.learner.base import Batch, Outputs
from palestra.train.samples import TurnColumns

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


@dataclass(slots=True)
class TokenRecord:
    """Gathers the learner's per-token results of one step, by sample."""

    columns: dict[int, dict[str, Array]] = field(default_factory=dict)  # by id of the sample
    samples: list[Sample] = field(default_factory=list)  # kept, so that the ids stay theirs

    def add(self, batch: Batch, outputs: Outputs) -> None:
        """The results of one forward_backward; of several passes over a sample, the last one's ratio counts."""
        own = outputs.logprobs()
        now, before = np.concatenate(own), np.concatenate(batch.old_logprobs or own)
        ratios = np.exp(now - np.where(np.isnan(before), now, before))
        ends = np.cumsum([len(row) for row in own])
        found = zip(batch.samples, own, outputs.entropies(), np.split(ratios, ends[:-1]), strict=True)
        for sample, logprob, entropy, ratio in found:
            if id(sample) not in self.columns:
                self.samples.append(sample)
                self.columns[id(sample)] = {"learner_logprob": logprob, "entropy": entropy}
            self.columns[id(sample)]["ratio"] = ratio

    def table(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], samples: Sequence[Sample]) -> Array:
        """[T] `TOKEN_COLUMNS` of all tokens of the step, trained or not."""
        rows = [
            (g, rollout.error is None, conversation, advantage)
            for g, (group, row) in enumerate(zip(groups, advantages, strict=True))
            for rollout, advantage in zip(group.rollouts, row, strict=True)
            for conversation in rollout.conversations
            if conversation.turns
        ]
        if not rows:
            return np.zeros(0, TOKEN_COLUMNS)
        columns = TurnColumns.of([row[2] for row in rows], [row[3] for row in rows])
        lengths, worth = columns.lengths, columns.advantages.copy()
        table = np.zeros(len(columns.token_ids), TOKEN_COLUMNS)
        for name in ("learner_logprob", "ratio", "entropy"):
            table[name] = np.nan
        is_sample, left, start = [], list(reversed(samples)), 0
        for (g, is_good, conversation, _), length in zip(rows, lengths, strict=True):
            part = slice(start, start + length)
            if isinstance(conversation, Rollout) and conversation.advantages is not None:
                worth[part] = conversation.advantages
            is_sample.append(bool(left) and is_good and _is_sample_of(left[-1], g, columns.token_ids[part]))
            if is_sample[-1]:
                left.pop()
            start += length
        table["logprob"] = np.where(columns.by_model, columns.logprobs, np.nan)
        table["advantage"] = np.where(columns.by_model, worth, np.nan)
        self._fill(table, np.repeat(np.array(is_sample), lengths), samples[: sum(is_sample)])
        return table

    def _fill(self, table: Array, places: Array, samples: Sequence[Sample]) -> None:
        """What was learned of the samples, whose tokens stand at these places."""
        if not samples:
            return
        policy_mask = np.concatenate([sample.policy_mask for sample in samples])
        table["policy_mask"][places] = policy_mask
        for name in ("learner_logprob", "ratio", "entropy"):
            known = (self.columns.get(id(sample), {}).get(name) for sample in samples)
            found = [np.full(len(s.token_ids), np.nan) if x is None else x for s, x in zip(samples, known, strict=True)]
            table[name][places] = np.where(policy_mask, np.concatenate(found), np.nan)


def _is_sample_of(sample: Sample, group: int, token_ids: Array) -> bool:
    """Samples come in the order of the conversations; those that train nothing are left out."""
    return sample.group == group and np.array_equal(sample.token_ids, token_ids)
