"""Groups of rollouts -> advantages -> samples for the learner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from palestra.algo.advantage import advantages as normalise
from palestra.algo.advantage import combine_measures
from palestra.core.config_sections import TrainSection
from palestra.core.errors import PalestraError
from palestra.core.types import CUT_OFF, Array, Group, Lineage, Rollout, Sample


def has_signal(group: Group, advantages: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Whether siblings differ: by these advantages, one a rollout, or by those that came along with them."""
    if any(r.advantages is not None and r.advantages.any() for r in group.rollouts):
        return True
    return any(abs(advantage) > tolerance for advantage in advantages)


def group_advantages(groups: Sequence[Group], train: TrainSection, weights: Mapping[str, float]) -> list[list[float]]:
    """The advantage of every rollout, by group. A rollout that failed has none and is in no baseline."""
    _require_finite(groups)
    rows = [(g, i) for g, group in enumerate(groups) for i, r in enumerate(group.rollouts) if r.error is None]
    result = [[0.0] * len(group.rollouts) for group in groups]
    if not rows:
        return result
    rollouts = [groups[g].rollouts[i] for g, i in rows]
    members = torch.tensor([g for g, _ in rows])
    scale, leave_one_out = train.advantage_scale, train.leave_one_out
    names = list(dict.fromkeys(name for r in rollouts for name in r.scores))
    if train.combine == "normalise_then_sum" and len(names) > 1:
        values = torch.tensor([[_value(r, name) for name in names] for r in rollouts])
        per_measure = torch.tensor([weights.get(n, 1.0) for n in names])
        values_out = combine_measures(
            values, per_measure, members, combine=train.combine, scale=scale, leave_one_out=leave_one_out
        )
    else:
        rewards = torch.tensor([r.reward for r in rollouts])
        values_out = normalise(rewards, members, scale=scale, leave_one_out=leave_one_out)
    for (g, i), value in zip(rows, values_out.tolist(), strict=True):
        result[g][i] = value
    return result


def _value(rollout: Rollout, name: str) -> float:
    """NaN where the measure was not run on this rollout."""
    return rollout.scores[name].value if name in rollout.scores else math.nan


def _require_finite(groups: Sequence[Group]) -> None:
    for group in groups:
        for i, reward in enumerate(group.rewards):
            if not math.isfinite(reward):
                raise PalestraError(
                    f"the reward of rollout {i} in the group of problem {group.problem_id!r} is {reward}; "
                    "a measure or reward function must return finite numbers"
                )


def trainable_samples(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], train: TrainSection, *, echo: bool = False
) -> list[Sample]:
    """The samples of the groups that are trained on: those with signal, unless `filter_equal_groups` is off.

    With `echo`, the tool results of the other groups are learned, too: to predict them no reward is needed.
    """
    pairs = zip(groups, advantages, strict=True)
    trained = [has_signal(group, row) or not train.filter_equal_groups for group, row in pairs]
    chosen = None if echo else [g for g, is_trained in enumerate(trained) if is_trained]
    samples = to_samples(groups, advantages, train.mask_truncated, chosen)
    return [
        sample if trained[sample.group] else replace(sample, policy_mask=np.zeros_like(sample.policy_mask))
        for sample in samples
        if trained[sample.group] or sample.echo_mask.any()
    ]


@dataclass(frozen=True, slots=True)
class TurnColumns:
    """The tokens of conversations laid end to end, all of a step at once: most turns are so short that a call of numpy
    for each takes longer than its work. Nothing writes into them, so that a part is taken as it is."""

    lengths: list[int]  # of the conversations
    token_ids: Array  # [T] int32
    by_model: Array  # [T] bool
    by_environment: Array  # [T] bool
    logprobs: Array  # [T] float32, 0 where the model did not make the token
    versions: Array  # [T] int32, 0 where the model did not make the token
    advantages: Array  # [T] float32, that of the conversation

    @classmethod
    def of(cls, conversations: Sequence[Rollout | Lineage], advantages: Sequence[float]) -> TurnColumns:
        turns = [turn for conversation in conversations for turn in conversation.turns]
        lengths = [len(turn.token_ids) for turn in turns]
        by_model, by_environment = (
            np.repeat(np.array([turn.maker == maker for turn in turns]), lengths) for maker in ("model", "environment")
        )
        logprobs, versions = np.zeros(len(by_model), np.float32), np.zeros(len(by_model), np.int32)
        logprobs[by_model] = np.concatenate([turn.logprobs for turn in turns])  # empty unless the model made the turn
        versions[by_model] = np.concatenate([turn.versions for turn in turns])
        token_ids = np.concatenate([turn.token_ids for turn in turns])
        whole = [sum([len(turn.token_ids) for turn in conversation.turns]) for conversation in conversations]
        worth = np.repeat(np.array(advantages, np.float32), whole)
        for column in (token_ids, by_model, by_environment, logprobs, versions, worth):
            column.setflags(write=False)
        return cls(whole, token_ids, by_model, by_environment, logprobs, versions, worth)


def to_samples(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    mask_truncated: bool,
    chosen: Iterable[int] | None = None,
) -> list[Sample]:
    """One sample for each conversation of the rollouts that did not fail, of all groups or the chosen ones.

    Lineages in which no turn is trained (rejected choices, side calls) are left out. A truncated rollout stays as a row
    without trained tokens, so that it still counts where a loss averages over rows. Advantages that a rollout brings
    along win.
    """
    rows = [
        (g, conversation, advantage)
        for g in (range(len(groups)) if chosen is None else chosen)
        for rollout, advantage in zip(groups[g].rollouts, advantages[g], strict=True)
        if rollout.error is None
        for conversation in rollout.conversations
        if isinstance(conversation, Rollout) or any(turn.maker == "model" for turn in conversation.turns)
    ]
    if not rows:
        return []
    columns = TurnColumns.of([conversation for _, conversation, _ in rows], [advantage for *_, advantage in rows])
    no_tokens = np.zeros(len(columns.token_ids), np.bool_)
    no_tokens.setflags(write=False)
    samples, start = [], 0
    for (g, conversation, _), length in zip(rows, columns.lengths, strict=True):
        part = slice(start, start + length)
        masked = mask_truncated and conversation.stop in CUT_OFF
        own = conversation.advantages if isinstance(conversation, Rollout) else None
        samples.append(
            Sample(
                token_ids=columns.token_ids[part],
                policy_mask=(no_tokens if masked else columns.by_model)[part],
                echo_mask=(no_tokens if masked else columns.by_environment)[part],
                logprobs=columns.logprobs[part],
                advantages=columns.advantages[part] if own is None else own,
                group=g,
                prompt_length=len(conversation.turns[0].token_ids),
                versions=columns.versions[part],
            )
        )
        start = part.stop
    return samples
