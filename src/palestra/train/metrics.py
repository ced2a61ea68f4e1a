"""What a step reports of its rollouts. The learner reports the rest."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from palestra.core.types import Group, Rollout
from palestra.train.samples import has_signal


def rollout_metrics(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], policy_version: int
) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools and failures of one step's groups."""
    rollouts = [r for g in groups for r in g.rollouts]
    good = [r for r in rollouts if r.error is None]
    out = {
        "rollouts": float(len(rollouts)),
        "rollout_failures": float(len(rollouts) - len(good)),
        "measure_errors": float(sum(s.error for r in rollouts for s in r.scores.values())),
    }
    if not good:
        return out
    rewards = [r.reward for r in good]
    flat = [
        a if r.advantages is None else _mean_advantage(r)
        for row, g in zip(advantages, groups, strict=True)
        for a, r in zip(row, g.rollouts, strict=True)
        if r.error is None
    ]
    lengths = [r.sampled_tokens for r in good]
    results = [t for r in good for t in r.tool_results]
    versions = [int(t.versions.min()) for r in good for t in r.turns if len(t.versions)]
    out |= {
        "reward_mean": statistics.fmean(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "reward_std": statistics.pstdev(rewards),
        "pass_rate": statistics.fmean(r.passed for r in good),
        "advantage_mean": statistics.fmean(flat),
        "advantage_max": max(flat),
        "advantage_min": min(flat),
        "completion_length_mean": statistics.fmean(lengths),
        "completion_length_max": float(max(lengths)),
        "truncation_rate": statistics.fmean(r.stop == "truncated" for r in good),
        "tool_calls_mean": len(results) / len(good),
        "tool_error_rate": statistics.fmean(not t.ok for t in results) if results else 0.0,
        "equal_reward_groups": statistics.fmean(not has_signal(g, a) for g, a in zip(groups, advantages, strict=True)),
        "sampled_tokens": float(sum(lengths)),
        "staleness_max": float(policy_version - min(versions, default=policy_version)),
    }
    for name in dict.fromkeys(name for r in good for name in r.scores):
        scores = [r.scores[name] for r in good if name in r.scores and not r.scores[name].error]
        if scores:
            out[f"score/{name}"] = statistics.fmean(score.value for score in scores)
        if verdicts := [score.passed for score in scores if score.passed is not None]:
            out[f"pass_rate/{name}"] = statistics.fmean(verdicts)
    for name in dict.fromkeys(name for g in groups for name in g.metrics):
        out[name] = statistics.fmean(g.metrics[name] for g in groups if name in g.metrics)
    return out


def _mean_advantage(rollout: Rollout) -> float:
    """Of advantages that came along with the rollout, token by token: their mean over the model's own tokens."""
    by_model = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in rollout.turns])
    assert rollout.advantages is not None
    return float(rollout.advantages[by_model].mean()) if by_model.any() else 0.0
