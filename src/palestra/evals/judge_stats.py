"""Can a judge be trusted? Its agreement with labels, and whether it prefers long answers."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

from palestra.core.types import Message, Rollout

LENGTH_CORRELATION = "judge/length_correlation/"  # + measure: mean over the groups in which both differ
LENGTH_GROUPS = "judge/length_groups/"  # + measure: how many groups those are
_RESAMPLES = 2000
_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Agreement:
    """Kendall's τ-b of a judge's scores and labels, over the pairs within each group."""

    tau: float
    low: float
    high: float
    pairs: int  # whose labels differ
    agreed: float  # the share of these that the judge orders as the labels do; a tie counts half


def is_total(metric: str) -> bool:
    """Whether a metric of groups is added up over a step, as calls and costs are, rather than averaged.

    >>> is_total("judge/calls"), is_total("judge/length_correlation/ruler"), is_total("agent/requests_per_attempt")
    (True, False, False)
    """
    return metric.startswith(("judge/", "user/")) and not metric.startswith(LENGTH_CORRELATION)


Scored = Sequence[tuple[float, float]]  # (judge's score, label) of the attempts of one group


def agreement(groups: Sequence[Scored], seed: int = 0) -> Agreement | None:
    """With a 95 % interval by resampling groups (single attempts where there is one group); None without pairs."""
    counts = [_count_pairs(group) for group in groups]
    total = _add(counts)
    tau = _tau_b(total)
    if tau is None:
        return None
    rng = random.Random(seed)
    taus = []
    for _ in range(_RESAMPLES):
        if len(groups) > 1:
            drawn = _tau_b(_add(rng.choices(counts, k=len(counts))))
        else:
            drawn = _tau_b(_count_pairs(rng.choices(groups[0], k=len(groups[0]))))
        taus += [] if drawn is None else [drawn]
    taus.sort()
    cut = round((1 - _LEVEL) / 2 * len(taus))
    low, high = (taus[cut], taus[-1 - cut]) if taus else (tau, tau)
    concordant, discordant, tied_scores, _ = total
    pairs = concordant + discordant + tied_scores
    return Agreement(tau, min(low, tau), max(high, tau), pairs, (concordant + tied_scores / 2) / pairs)


Pairs = tuple[int, int, int, int]  # concordant, discordant, tied in scores only, tied in labels only


def _count_pairs(group: Scored) -> Pairs:
    counts = [0, 0, 0, 0]
    for (score, label), (other_score, other_label) in combinations(group, 2):
        scores, labels = _sign(score - other_score), _sign(label - other_label)
        if scores and labels:
            counts[0 if scores == labels else 1] += 1
        elif labels:
            counts[2] += 1
        elif scores:
            counts[3] += 1
    return counts[0], counts[1], counts[2], counts[3]


def _sign(value: float) -> int:
    return (value > 1e-9) - (value < -1e-9)


def _add(rows: Sequence[Pairs]) -> Pairs:
    a, b, c, d = (sum(column) for column in zip((0, 0, 0, 0), *rows, strict=True))
    return a, b, c, d


def _tau_b(counts: Pairs) -> float | None:
    """
    >>> _tau_b((3, 0, 0, 0)), _tau_b((1, 1, 0, 0)), _tau_b((0, 0, 0, 4))
    (1.0, 0.0, None)
    """
    concordant, discordant, tied_scores, tied_labels = counts
    by_label, by_score = concordant + discordant + tied_scores, concordant + discordant + tied_labels
    if not by_label:
        return None
    return (concordant - discordant) / math.sqrt(by_label * by_score) if by_score else 0.0


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
