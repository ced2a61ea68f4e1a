"""What a step reports of its rollouts. The learner reports the rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from palestra.core.types import Group, Rollout, oldest_version
from palestra.evals.rollout_stats import rollout_stats
from palestra.train.samples import has_signal


def rollout_metrics(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], policy_version: int
) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools, failures and advantages of one step's groups."""
    pairs = list(zip(groups, advantages, strict=True))
    out = rollout_stats([r for group in groups for r in group.rollouts])
    good = [(r, a) for group, row in pairs for r, a in zip(group.rollouts, row, strict=True) if r.error is None]
    if not good:
        return out
    flat = [advantage if r.advantages is None else _mean_advantage(r) for r, advantage in good]
    oldest = oldest_version(r for r, _ in good)
    with_signal = sum(has_signal(group, row) for group, row in pairs)
    out |= {
        "groups": float(len(groups)),
        "signal_groups": float(with_signal),
        "advantage_mean": statistics.fmean(flat),
        "advantage_max": max(flat),
        "advantage_min": min(flat),
        "equal_reward_groups": 1.0 - with_signal / len(groups),
        "staleness_max": 0.0 if oldest is None else float(policy_version - oldest),
    }
    for name in dict.fromkeys(name for g in groups for name in g.metrics):
        out[name] = statistics.fmean(g.metrics[name] for g in groups if name in g.metrics)
    return out


def _mean_advantage(rollout: Rollout) -> float:
    """Of advantages that came along with the rollout, token by token: their mean over the model's own tokens."""
    by_model = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in rollout.turns])
    assert rollout.advantages is not None
    return float(rollout.advantages[by_model].mean()) if by_model.any() else 0.0
