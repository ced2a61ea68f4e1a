"""Credit for single turns: returns-to-go, and GiGPO's comparison of actions that were taken in the same state.

A turn is what the model samples between two answers of the world. Its return is its own reward plus the discounted
rewards of the turns after it.

    >>> returns_to_go([0.0, 0.5, 1.0], discount=0.5).tolist()
    [0.5, 1.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from palestra.algo.advantage import Scale, advantages
from palestra.core.types import Array


def returns_to_go(rewards: Sequence[float] | Array, discount: float) -> Array:
    """[K] float64: of each turn, Σ discount^(j−k) · reward_j over itself and the turns j after it."""
    returns = np.array(rewards, np.float64)
    for k in range(len(returns) - 2, -1, -1):
        returns[k] += discount * returns[k + 1]
    return returns


def return_advantages(
    turn_rewards: Sequence[Array],  # of each rollout, [turns]
    group: Sequence[int],  # of each rollout
    *,
    discount: float,
    scale: Scale = "group",
) -> list[Array]:
    """The advantage of every turn: its return, compared with those of all turns of the group's rollouts."""
    returns = [returns_to_go(rewards, discount) for rewards in turn_rewards]
    members = np.repeat(np.array(group, int), [len(row) for row in returns])
    return _split(advantages(_flat(returns), torch.from_numpy(members), scale=scale).numpy(), returns)


def gigpo_advantages(
    episode: Sequence[float],  # the advantage of each rollout
    turn_rewards: Sequence[Array],  # of each rollout, [turns]
    states: Sequence[Sequence[Hashable]],  # of each rollout, the state in which each of its turns began
    group: Sequence[int],  # of each rollout
    *,
    discount: float,
    step_weight: float = 1.0,
    scale: Scale = "group",
) -> list[Array]:
    """GiGPO (arXiv 2505.10978): the rollout's advantage + step_weight · that of the turn, by its return among all turns
    of the group that began in the same state. A state that was met once says nothing: the second part is 0."""
    returns = [returns_to_go(rewards, discount) for rewards in turn_rewards]
    numbers: dict[tuple[int, Hashable], int] = {}
    met = [numbers.setdefault((g, s), len(numbers)) for g, row in zip(group, states, strict=True) for s in row]
    rows = _split(advantages(_flat(returns), met, scale=scale).numpy(), returns)
    return [whole + step_weight * row for whole, row in zip(episode, rows, strict=True)]


def _flat(rows: Sequence[Array]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0), *rows]))


def _split(flat: Array, rows: Sequence[Array]) -> list[Array]:
    return np.split(flat, np.cumsum([len(row) for row in rows])[:-1]) if rows else []
