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

from palestra.core.types import Array, Group, Lineage, Rollout, Sample
from palestra.learner.base import Batch, Outputs

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
        parts, left = [], list(reversed(samples))
        for g, (group, row) in enumerate(zip(groups, advantages, strict=True)):
            for rollout, advantage in zip(group.rollouts, row, strict=True):
                for conversation in rollout.conversations:
                    part = _rows(conversation, advantage)
                    if left and rollout.error is None and _is_sample_of(left[-1], g, conversation):
                        self._fill(part, left.pop())
                    parts.append(part)
        return np.concatenate(parts) if parts else np.zeros(0, TOKEN_COLUMNS)

    def _fill(self, part: Array, sample: Sample) -> None:
        part["policy_mask"] = sample.policy_mask
        for name, values in self.columns.get(id(sample), {}).items():
            part[name] = np.where(sample.policy_mask, values, np.nan)


def _rows(conversation: Rollout | Lineage, advantage: float) -> Array:
    """What is known of the tokens before anything is learned."""
    turns = conversation.turns
    rows = np.zeros(sum(len(turn.token_ids) for turn in turns), TOKEN_COLUMNS)
    for name in ("logprob", "learner_logprob", "ratio", "entropy", "advantage"):
        rows[name] = np.nan
    start, own = 0, conversation.advantages if isinstance(conversation, Rollout) else None
    for turn in turns:
        end = start + len(turn.token_ids)
        if turn.maker == "model":
            rows["logprob"][start:end] = turn.logprobs
            rows["advantage"][start:end] = advantage if own is None else own[start:end]
        start = end
    return rows


def _is_sample_of(sample: Sample, group: int, conversation: Rollout | Lineage) -> bool:
    """Samples come in the order of the conversations; those that train nothing are left out."""
    tokens = np.concatenate([turn.token_ids for turn in conversation.turns])
    return sample.group == group and np.array_equal(sample.token_ids, tokens)
