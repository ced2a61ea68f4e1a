"""What a step reports of its rollouts. The learner reports the rest."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Sequence

import numpy as np

from palestra.core.types import Group, Rollout, oldest_version
from palestra.evals.judge_stats import is_total
from palestra.evals.rollout_stats import called_successfully, is_judged, rollout_stats
from palestra.train.batch import has_signal


def peak_memory_gib() -> float:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)


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
    out |= _group_outcomes(groups) | _reinforced(list(zip([r for r, _ in good], flat, strict=True)))
    for name in dict.fromkeys(name for g in groups for name in g.metrics):
        values = [g.metrics[name] for g in groups if name in g.metrics]
        out[name] = sum(values) if is_total(name) else statistics.fmean(values)
    return out


def _group_outcomes(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of the groups in which every rollout passed, and in which none did."""
    verdicts = [[r.passed for r in g.rollouts if r.error is None and is_judged(r)] for g in groups]
    judged = [row for row in verdicts if row]
    if not judged:
        return {}
    return {
        "passed_groups": statistics.fmean(all(row) for row in judged),
        "failed_groups": statistics.fmean(not any(row) for row in judged),
    }


def _reinforced(rollouts: Sequence[tuple[Rollout, float]]) -> dict[str, float]:
    """Count the rollouts with a positive advantage, and those of them in which no tool call succeeded."""
    if not any(r.tool_names for r, _ in rollouts):
        return {}
    found = [r for r, advantage in rollouts if advantage > 1e-6 and r.tool_names]
    without = sum(not called_successfully(r) for r in found)
    return {"reinforced_rollouts": float(len(found)), "reinforced_without_tools": float(without)}


def _mean_advantage(rollout: Rollout) -> float:
    """Of advantages that came along with the rollout, token by token: their mean over the model's own tokens."""
    by_model = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in rollout.turns])
    assert rollout.advantages is not None
    return float(rollout.advantages[by_model].mean()) if by_model.any() else 0.0
