"""Distillation along the model's own rollouts: a teacher scores the student's k candidates for every sampled token.

`DistillLoss` compares both at `rollout.temperature`; its gradient is added to that of the policy loss. In
self-distillation (SDPO, arXiv 2601.20802; OPSD, arXiv 2601.18734) the teacher is the model as it is now, with a hint in
its prompt (`rollout.hints`); the weight of a group is 1 − its pass rate. Else the teacher is another model with the
same tokenizer, which reads the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from palestra.algo.batch import Batch, Targets
from palestra.algo.distill import TEACHER, WEIGHT, DistillLoss
from palestra.core.config import RunConfig
from palestra.core.types import Array, Group
from palestra.learner.base import Learner
from palestra.learner.local import LocalLearner
from palestra.train.batch import conversations_of, to_batch
from palestra.train.distill_teachers import ServerTeacher, Teacher, no_top_tokens

DistillPart = tuple[Batch, DistillLoss]  # of one optimizer step


@dataclass(frozen=True, slots=True)
class DistillRows:
    """The rows of a step that a teacher has something to say about."""

    teacher: Teacher
    config: RunConfig
    batch: Batch
    prompts: Sequence[Array]  # the teacher's, of each row
    weights: Array  # [R]
    passed: Array  # [R] bool
    tokens_total: int  # trained tokens of all rollouts of the step, also of those that are not distilled
    metrics: dict[str, float]  # `parts` adds those of the teacher

    def parts(self, learner: Learner) -> list[DistillPart]:
        """Batches with the student's candidates and the teacher's log-probabilities, one for each optimizer step."""
        if not isinstance(learner, LocalLearner):
            raise no_top_tokens(learner)
        if not self.batch.rows:
            return []
        batch, options = self.batch, self.config.distill
        if isinstance(self.teacher, ServerTeacher):  # it scores the sampled tokens only
            at = np.flatnonzero(batch.predicted(batch.policy_mask))
            ids, ours = batch.token_ids[at][:, None].astype(np.int64), batch.logprobs[at][:, None]
        else:
            ids, ours = learner.top_logprobs(batch, options.top_k)
        theirs = self.teacher.logprobs(teacher_batch(batch, self.prompts, ids))
        gain = teacher_gain(batch, self.passed, ids, theirs.reshape(ids.shape) - ours)
        self.metrics.update({} if gain is None else {"teacher_gain": gain})
        counts = batch.count(batch.predicted(batch.policy_mask))
        weights = np.repeat(np.repeat(self.weights, counts), ids.shape[1])
        targets = candidates(batch, ids, {TEACHER: theirs, WEIGHT: weights})
        parts = replace(batch, targets=targets).minibatches(self.config.train.minibatches)
        loss = DistillLoss(
            options.divergence,
            ids.shape[1],
            places_total=self.tokens_total / len(parts),
            coefficient=options.coefficient,
            tail=ids.shape[1] < learner.vocabulary,
        )
        return [(part, loss) for part in parts]


def choose_rows(
    teacher: Teacher, groups: Sequence[Group], advantages: Sequence[Sequence[float]], config: RunConfig
) -> DistillRows:
    """The rollouts of a step with the teacher's prompts. Groups whose rewards are all equal are among them."""
    conversations = conversations_of(groups, advantages)
    batch = to_batch(groups, advantages, mask_truncated=config.train.mask_truncated)
    trained = batch.count(batch.predicted(batch.policy_mask))
    chosen: list[tuple[int, Array, float, bool]] = []
    too_long = 0
    for row, number in enumerate(batch.conversations.tolist()):
        conversation = conversations[number]
        group = groups[conversation.group]
        weight = teacher.weight(group)
        prompt = teacher.prompt(group, conversation) if weight > 0 and trained[row] else None
        if prompt is None:
            continue
        length = len(prompt) + int(batch.lengths[row]) - int(batch.prompt_lengths[row])
        if teacher.context_tokens is not None and length > teacher.context_tokens:
            too_long += 1
        else:
            chosen.append((row, prompt, weight, conversation.rollout.passed))
    samples = list(batch.samples())
    metrics = {"distill_rollouts": float(len(chosen)), "distill_too_long": float(too_long)}
    rows, prompts, weights, passed = zip(*chosen, strict=True) if chosen else ((), (), (), ())
    return DistillRows(
        teacher,
        config,
        Batch.of([samples[row] for row in rows]),
        prompts,
        np.array(weights, np.float32),
        np.array(passed, np.bool_),
        int(trained.sum()),
        metrics | teacher.metrics(groups),
    )


def teacher_gain(batch: Batch, passed: Array, ids: Array, differences: Array) -> float | None:
    """How much better the teacher tells passed from failed rollouts than the student does, in nats per token.

    `differences` [M, k] are teacher − student. What counts is their mean over the sampled tokens of each row: the rows
    that passed against those that failed, in groups with both. None where there is no such group. A teacher whose gain
    is not above 0 does not know what makes an attempt good.
    """
    trained = batch.predicted(batch.policy_mask)
    at = np.flatnonzero(trained)
    is_sampled = ids == batch.token_ids[at][:, None]
    place, column = np.nonzero(is_sampled)  # places whose sampled token is among the candidates
    row = batch.row_of(at[place])
    counts = np.bincount(row, minlength=batch.rows)
    means = np.bincount(row, differences[place, column], minlength=batch.rows) / np.maximum(counts, 1)
    gains = []
    for group in np.unique(batch.groups):
        here = (batch.groups == group) & (counts > 0)
        if (here & passed).any() and (here & ~passed).any():
            gains.append(means[here & passed].mean() - means[here & ~passed].mean())
    return float(np.mean(gains)) if gains and np.isfinite(gains).all() else None


def candidates(batch: Batch, ids: Array, inputs: Mapping[str, Array], shifts: Array | None = None) -> Targets:
    """[M, k] ids as targets at the trained places of the rows; `shifts` moves those of each row."""
    trained, k = batch.predicted(batch.policy_mask), ids.shape[1]
    at, counts = np.flatnonzero(trained), batch.count(trained)
    places = at - np.repeat(batch.offsets[:-1], counts)
    if shifts is not None:
        places += np.repeat(shifts, counts)
    offsets = np.cumsum([0, *(counts * k)])
    return Targets(ids.ravel(), np.repeat(places, k), offsets, inputs, per_place=k)


def teacher_batch(batch: Batch, prompts: Sequence[Array], ids: Array) -> Batch:
    """The rows as the teacher reads them: its own prompts, then the student's tokens, with [M, k] candidates."""
    own = zip(pairwise(batch.offsets.tolist()), batch.prompt_lengths.tolist(), prompts, strict=True)
    read = [np.concatenate([prompt, batch.token_ids[first + length : last]]) for (first, last), length, prompt in own]
    lengths = np.array([len(prompt) for prompt in prompts], int)
    targets = candidates(batch, ids, {}, shifts=lengths - batch.prompt_lengths)
    return Batch.of_targets(read, targets, batch.groups, lengths)
