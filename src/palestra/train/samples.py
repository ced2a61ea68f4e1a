"""Groups of rollouts -> samples for the learner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from palestra.algo.advantage import advantages as normalise
from palestra.algo.advantage import combine_measures
from palestra.core.config import TrainSection
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Rollout, Sample


def has_signal(group: Group, tolerance: float = 1e-6) -> bool:
    """Whether siblings were rewarded differently: if not, every advantage is 0."""
    rewards = [r.reward for r in group.rollouts if r.error is None]
    return len(rewards) > 1 and max(rewards) - min(rewards) > tolerance


def group_advantages(groups: Sequence[Group], train: TrainSection, weights: Mapping[str, float]) -> list[list[float]]:
    """The advantage of every rollout, by group. A rollout that failed has none and is in no baseline."""
    _require_finite(groups)
    rows = [(g, i) for g, group in enumerate(groups) for i, r in enumerate(group.rollouts) if r.error is None]
    result = [[0.0] * len(group.rollouts) for group in groups]
    if not rows:
        return result
    members = torch.tensor([g for g, _ in rows])
    scale, leave_one_out = train.advantage_scale, train.leave_one_out
    names = list(groups[rows[0][0]].rollouts[rows[0][1]].scores)
    if train.combine == "normalise_then_sum" and len(names) > 1:
        values = torch.tensor([[groups[g].rollouts[i].scores[n].value for n in names] for g, i in rows])
        per_measure = torch.tensor([weights.get(n, 1.0) for n in names])
        values_out = combine_measures(
            values, per_measure, members, combine=train.combine, scale=scale, leave_one_out=leave_one_out
        )
    else:
        rewards = torch.tensor([groups[g].rollouts[i].reward for g, i in rows])
        values_out = normalise(rewards, members, scale=scale, leave_one_out=leave_one_out)
    for (g, i), value in zip(rows, values_out.tolist(), strict=True):
        result[g][i] = value
    return result


def _require_finite(groups: Sequence[Group]) -> None:
    for group in groups:
        for i, reward in enumerate(group.rewards):
            if not math.isfinite(reward):
                raise PalestraError(
                    f"the reward of rollout {i} in the group of problem {group.problem_id!r} is {reward}; "
                    "a measure or reward function must return finite numbers"
                )


def trainable_samples(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], train: TrainSection
) -> list[Sample]:
    """The samples of the groups that are trained on: those with signal, unless `filter_equal_groups` is off."""
    kept = [i for i, group in enumerate(groups) if has_signal(group) or not train.filter_equal_groups]
    return to_samples([groups[i] for i in kept], [advantages[i] for i in kept], train.mask_truncated)


def to_samples(groups: Sequence[Group], advantages: Sequence[Sequence[float]], mask_truncated: bool) -> list[Sample]:
    """One sample for each rollout that did not fail.

    A truncated rollout stays as a row without trained tokens, so that it still counts where a
    loss averages over rows.
    """
    return [
        to_sample(rollout, advantage, group=g, silent=mask_truncated and rollout.stop == "truncated")
        for g, (group, row) in enumerate(zip(groups, advantages, strict=True))
        for rollout, advantage in zip(group.rollouts, row, strict=True)
        if rollout.error is None
    ]


def to_sample(rollout: Rollout, advantage: float, *, group: int, silent: bool = False) -> Sample:
    """The rollout's turns laid end to end, with who made each token."""
    ids: list[int] = []
    trained: list[bool] = []
    observed: list[bool] = []
    logprobs: list[float] = []
    for turn in rollout.turns:
        count = len(turn.token_ids)
        by_model = turn.maker == "model"
        ids += turn.token_ids
        trained += [by_model and not silent] * count
        observed += [turn.maker == "environment" and not silent] * count
        logprobs += turn.logprobs if by_model else [0.0] * count
    return Sample(
        token_ids=tuple(ids),
        trained=tuple(trained),
        observed=tuple(observed),
        logprobs=tuple(logprobs),
        advantage=advantage,
        group=group,
        prompt_length=len(rollout.turns[0].token_ids),
        policy_version=min((t.policy_version for t in rollout.turns if t.maker == "model"), default=0),
    )
