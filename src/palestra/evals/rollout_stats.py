"""Some rollouts as numbers: what a training step and an evaluation report of theirs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from palestra.core.types import Rollout, Score

_TAIL = 96  # tokens at the end of a rollout that are looked at for repetition
_NGRAM = 4


def rollout_stats(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools and failures. Rollouts that failed are counted, and in no mean."""
    good = [r for r in rollouts if r.error is None]
    out = {
        "rollouts": float(len(rollouts)),
        "rollout_failures": float(len(rollouts) - len(good)),
        "measure_errors": float(sum(s.error for r in rollouts for s in r.scores.values())),
    }
    for name, scores in _scores(rollouts).items():
        if failed := sum(score.error for score in scores):
            out[f"measure_errors/{name}"] = float(failed)
    if not good:
        return out
    rewards = [r.reward for r in good]
    lengths = [r.sampled_tokens for r in good]
    out |= {
        "reward_mean": statistics.fmean(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "reward_std": statistics.pstdev(rewards),
        "completion_length_mean": statistics.fmean(lengths),
        "completion_length_max": float(max(lengths)),
        "sampled_tokens": float(sum(lengths)),
        "turns_mean": statistics.fmean(sum(turn.maker == "model" for turn in r.turns) for r in good),
        "truncation_rate": statistics.fmean(r.cut_off for r in good),
        "context_full_rate": statistics.fmean(r.stop == "context_full" for r in good),
        "looping_rate": statistics.fmean(r.cut_off and loops(r) for r in good),
    }
    if judged := [r for r in good if any(s.decides for s in r.scores.values())]:
        out["pass_rate"] = statistics.fmean(r.passed for r in judged)
    out |= _tool_stats(good)
    for name, scores in _scores(good).items():
        if valid := [score for score in scores if not score.error]:
            out[f"score/{name}"] = statistics.fmean(score.value for score in valid)
        if verdicts := [score.passed for score in valid if score.passed is not None]:
            out[f"pass_rate/{name}"] = statistics.fmean(verdicts)
    return out


def loops(rollout: Rollout) -> bool:
    """Whether what the model sampled last repeats itself."""
    turn = next((t for t in reversed(rollout.turns) if t.maker == "model"), None)
    tail = [] if turn is None else turn.token_ids[-_TAIL:].tolist()
    ngrams = list(zip(*(tail[i:] for i in range(_NGRAM)), strict=False))
    return len(tail) >= _TAIL // 4 and len(set(ngrams)) < len(ngrams) / 3


def _tool_stats(rollouts: Sequence[Rollout]) -> dict[str, float]:
    results = [result for r in rollouts for result in r.tool_results]
    unknown = [result.call.name not in r.tool_names for r in rollouts if r.tool_names for result in r.tool_results]
    return {
        "tools_offered": statistics.fmean(len(r.tool_names) for r in rollouts),
        "tool_calls_mean": len(results) / len(rollouts),
        "tool_error_rate": statistics.fmean(not result.ok for result in results) if results else 0.0,
        "unknown_tool_rate": statistics.fmean(unknown) if unknown else 0.0,
    }


def _scores(rollouts: Sequence[Rollout]) -> dict[str, list[Score]]:
    found: dict[str, list[Score]] = {}
    for rollout in rollouts:
        for name, score in rollout.scores.items():
            found.setdefault(name, []).append(score)
    return found
