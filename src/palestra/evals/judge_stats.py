"""Can a judge be trusted? Whether it prefers long answers."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from palestra.core.types import Message, Rollout

LENGTH_CORRELATION = "judge/length_correlation/"  # + measure: mean over the groups in which both differ
LENGTH_GROUPS = "judge/length_groups/"  # + measure: how many groups those are


def is_total(metric: str) -> bool:
    """Whether a metric of groups is added up over a step, as calls and costs are, rather than averaged.

    >>> is_total("judge/calls"), is_total("judge/length_correlation/ruler"), is_total("agent/requests_per_attempt")
    (True, False, False)
    """
    return metric.startswith(("judge/", "user/")) and not metric.startswith(LENGTH_CORRELATION)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's; None where one of both does not vary."""
    try:
        return statistics.correlation(xs, ys)
    except statistics.StatisticsError:
        return None


def answer_length(messages: Sequence[Message]) -> int:
    """Characters of the last assistant message: tool calls and their results are work, not answer."""
    return next((len(m.text) for m in reversed(messages) if m.role == "assistant"), 0)


def length_metrics(rollouts: Sequence[Rollout], judges: Collection[str]) -> dict[str, float]:
    """The correlation of each judge's scores with the length of the answers, among the siblings of one group."""
    out: dict[str, float] = {}
    for name in sorted(judges):
        rows = [(r, r.scores[name]) for r in rollouts if name in r.scores and not r.scores[name].error]
        if len(rows) < 2:
            continue
        found = correlation([answer_length(r.messages) for r, _ in rows], [score.value for _, score in rows])
        if found is not None:
            out |= {f"{LENGTH_CORRELATION}{name}": found, f"{LENGTH_GROUPS}{name}": 1.0}
    return out
