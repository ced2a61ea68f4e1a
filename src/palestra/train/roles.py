"""Advantages of several agents in one attempt, each by its own rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from palestra.core.config_sections import TrainSection
from palestra.core.types import Array, Group, Lineage, Rollout
from palestra.rollout.rewards import role_score
from palestra.train.batch import group_advantages


def with_role_advantages(groups: Sequence[Group], train: TrainSection, weights: Mapping[str, float]) -> list[Group]:
    """The groups with an advantage for each conversation, where a measure tells the agents of an attempt apart.

    An agent's baseline is the reward of the same agent in the other attempts.
    """
    if not any(score.roles for group in groups for r in group.rollouts for score in r.scores.values()):
        return list(groups)
    roles = dict.fromkeys(c.role for group in groups for r in group.rollouts for c in r.conversations)
    values = {role: group_advantages([_as_seen_by(role, g, weights) for g in groups], train, weights) for role in roles}
    done = []
    for g, group in enumerate(groups):
        rows = [{role: values[role][g][i] for role in roles} for i in range(len(group.rollouts))]
        done.append(replace(group, rollouts=tuple(map(_with, group.rollouts, rows))))
    return done


def _as_seen_by(role: str, group: Group, weights: Mapping[str, float]) -> Group:
    """The group with the scores and rewards of one agent."""
    rollouts = []
    for rollout in group.rollouts:
        scores = {name: replace(s, value=role_score(s, role), roles={}) for name, s in rollout.scores.items()}
        reward = sum(weights.get(name, 1.0) * score.value for name, score in scores.items())
        rollouts.append(replace(rollout, scores=scores, reward=reward, advantages=None, lineages=()))
    return replace(group, rollouts=tuple(rollouts))


def _with(rollout: Rollout, values: Mapping[str, float]) -> Rollout:
    lineages = tuple(replace(x, advantages=_fill(x, values[x.role])) for x in rollout.lineages)
    return replace(rollout, advantages=_fill(rollout, values[rollout.role]), lineages=lineages)


def _fill(conversation: Rollout | Lineage, value: float) -> Array:
    return np.full(sum(len(turn.token_ids) for turn in conversation.turns), value, np.float32)
