"""How much better than its siblings each rollout was.

>>> advantages([1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], scale="none").tolist()
[0.5, -0.5, 0.0, 0.0]
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palestra.core.errors import InputError, UserCodeError
from palestra.core.types import Array

Scale = Literal["group", "batch", "mean", "none"]
Numbers = Sequence[float] | Tensor


def advantages(
    rewards: Numbers,  # [R]
    group: Sequence[int] | Tensor,  # [R] which group each row belongs to; any integers
    *,
    scale: Scale = "group",
    leave_one_out: bool = False,
    eps: float = 1e-4,
) -> Tensor:
    """[R] float64: reward minus the group's mean, over the standard deviation of the group or the batch, or over the
    group's mean (MaxRL), which weighs rare successes more; rewards must not be negative then.

    Leave-one-out takes the mean of a row's siblings without itself. A group of one has no
    siblings to compare with: its advantage is 0. Equal rewards give exactly 0.
    """
    reward = _finite(torch.as_tensor(rewards, dtype=torch.float64), "reward of row {}")  # [R]
    ids = torch.as_tensor(group, dtype=torch.int64)
    if ids.shape != reward.shape:
        raise InputError(f"{len(reward)} rewards but a group list of shape {list(ids.shape)}; expected one group a row")
    _, row_group, counts = ids.unique(return_inverse=True, return_counts=True)
    groups, size = len(counts), counts.double()

    # Measured from the group's lowest reward, equal rewards are exact zeros and stay so.
    lowest = torch.full((groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, row_group, reward, "amin")
    above = reward - lowest[row_group]
    mean = _sums(above, row_group, groups) / size
    centred = above - mean[row_group]

    if scale == "group":
        variance = _sums(centred**2, row_group, groups) / (size - 1).clamp(min=1)
        deviation = variance.sqrt()[row_group]
    elif scale == "batch":
        deviation = reward.std() if len(reward) > 1 else torch.zeros(())
    elif scale == "mean":
        if (reward < 0).any():
            raise InputError("train.advantage_scale = mean needs rewards of 0 or more, and there are negative ones")
        deviation = (lowest + mean)[row_group]
    else:
        deviation = None

    if leave_one_out:
        centred = centred * (size / (size - 1).clamp(min=1))[row_group]
    return centred if deviation is None else centred / (deviation + eps)


def combine_measures(
    values: Sequence[Sequence[float]] | Tensor,  # [R, M]; NaN where a measure has no value for a row
    weights: Numbers,  # [M]
    group: Sequence[int] | Tensor,  # [R]
    *,
    scale: Scale = "group",
    leave_one_out: bool = False,
) -> Tensor:
    """[R] float64: the advantages by each measure alone, weighed and added.

    This keeps a measure with a small spread from drowning in one with a large spread.
    """
    value, members = torch.as_tensor(values, dtype=torch.float64), torch.as_tensor(group)
    weight = torch.as_tensor(weights, dtype=torch.float64)
    total = torch.zeros(len(value), dtype=torch.float64)
    for measure, (one, factor) in enumerate(zip(value.T, weight, strict=True)):
        rows = ~one.isnan()
        _finite(one.masked_fill(~rows, 0.0), f"measure {measure} of row {{}}")
        total[rows] += factor * advantages(one[rows], members[rows], scale=scale, leave_one_out=leave_one_out)
    return total


def _sums(values: Tensor, row_group: Tensor, groups: int) -> Tensor:
    return torch.zeros(groups, dtype=values.dtype).index_add(0, row_group, values)


def _finite(values: Tensor, name: str) -> Tensor:
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise UserCodeError(
            f"{name.format(row)} is {values[row].item()}; expected a finite number. Look at the measure that gave it"
        )
    return values


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
