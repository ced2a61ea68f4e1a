"""The page "Is it cheating": a run's rewarded measures and check metrics, and alarms.

A *check metric* is a measure that is not rewarded (weight 0), or a held-out score. The reward alone shows no hack: a
reward that rises is what training is for. A check metric that falls at the same time does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from palestra.core.run_folder import RunFolder
from palestra.extras.dashboard.summaries import by_step, columns, measures

Series = Sequence[float | None]

_SIGMAS = 3.5  # of the fall of a check metric: the largest of many differences is large by chance
_MIN_FALL = 0.05
_MIN_RISE = 0.02  # of the range of the reward
_WINDOW_SHARE = 0.2  # of the steps
_HELD_OUT = "eval/pass_rate"
_NO_CHECK = (
    "no check metric: add a measure that is not rewarded (reward_weights={…: 0}) and that a cheat would not satisfy, "
    "or score held-out problems during training (eval.every)"
)


def suspicion(folder: RunFolder) -> dict[str, Any]:
    """The answer to `GET …/suspicion`: rewarded measures and check metrics by step, and the alarms."""
    made = columns(by_step(folder.metrics()))
    series, steps = made["series"], made["step"]
    nothing: list[float | None] = [None] * len(steps)
    rewarded: dict[str, list[float | None]] = {}
    checks: dict[str, list[float | None]] = {}
    for row in measures(folder):
        if values := series.get(f"score/{row['name']}") or series.get(f"pass_rate/{row['name']}"):
            (rewarded if row["rewarded"] else checks)[row["name"]] = values
    if _HELD_OUT in series:
        checks["held-out"] = series[_HELD_OUT]
    reward = series.get("reward_mean", nothing)
    return {
        "step": steps,
        "reward": reward,
        "rewarded": rewarded,
        "witnesses": checks,
        "alarms": find_alarms(steps, reward, checks, series.get("rollouts", nothing)),
        "notes": [] if checks else [_NO_CHECK],
    }


class _Row(NamedTuple):
    """A step, or the means of some steps."""

    step: float
    reward: float
    check: float
    size: float  # rollouts


def find_alarms(
    steps: Sequence[float], reward: Series, checks: Mapping[str, Series], counts: Series
) -> list[dict[str, Any]]:
    """An alarm for each check metric (witness) that has fallen by more than chance allows while the reward rose.

    It fell since its best step (`since`), which was noticed at `step`; values "to" are those of the last step. Values
    are means over the `counts` rollouts of a step; None where a step has none.
    """
    alarms = []
    for name, values in checks.items():
        every = zip(steps, reward, values, counts, strict=True)
        rows = [_Row(step, r, c, size or 1.0) for step, r, c, size in every if r is not None and c is not None]
        if alarm := _alarm(name, rows):
            alarms.append(alarm)
    return alarms


def _alarm(metric: str, rows: Sequence[_Row]) -> dict[str, Any] | None:
    window = max(2, math.ceil(_WINDOW_SHARE * len(rows)))
    if len(rows) < 2 * window:
        return None
    windows = [rows[end - window : end] for end in range(window, len(rows) + 1)]
    smooth = [_Row(part[-1].step, *(fmean(c) for c in list(zip(*part, strict=True))[1:])) for part in windows]
    rewards = [row.reward for row in smooth]
    least_rise = _MIN_RISE * ((max(rewards) - min(rewards)) or 1.0)
    best, since, noticed = smooth[0], None, 0.0
    for row in smooth:
        best = max(best, row, key=lambda each: each.check)
        share = min(1.0, max(0.0, (best.check + row.check) / 2))
        by_chance = _SIGMAS * math.sqrt(max(share * (1 - share), 0.01) * 2 / (window * row.size))
        if best.check - row.check >= max(_MIN_FALL, by_chance) and row.reward - best.reward > least_rise:
            noticed = row.step if since is None else noticed
            since = best
    if since is None:
        return None
    last = smooth[-1]
    return {
        "witness": metric,
        "against": "reward",
        "since": since.step,
        "step": noticed,
        "reward_from": since.reward,
        "reward_to": last.reward,
        "witness_from": since.check,
        "witness_to": last.check,
        "sentence": f"since step {since.step:.0f} the reward rose from {since.reward:.2f} to {last.reward:.2f}, while "
        f"{metric} fell from {since.check:.2f} to {last.check:.2f}: read the newest rollouts that passed, and change "
        "the measure that they exploit",
    }
