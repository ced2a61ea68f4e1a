"""Is a rising reward real? Check metrics against rewards, and successes that become alike.

A *check metric* is a measure that is not rewarded (weight 0), or a held-out score. The reward alone shows no hack: a
reward that rises is what training is for. A check metric that falls at the same time does, and so does the kind of
success that spreads fastest, above all if the check metric does not confirm it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

Series = Sequence[float | None]

_SIGMAS = 3.5  # of the fall of a check metric: the largest of many differences is large by chance
_MIN_FALL = 0.05
_MIN_RISE = 0.02  # of the range of the reward
_WINDOW_SHARE = 0.2  # of the steps: what "early" and "late" are
_MIN_GROWTH = 0.1  # of the share that a phrase or a suspected shape has of the successes
_MAX_PHRASES = 5
_MAX_WORDS = 4  # of a phrase
_MAX_CLUSTERS = 30
_MAX_TOOLS = 8
_WORD = re.compile(r"\w+")
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A check metric fell while the reward rose: since its best step, noticed at `step`; values "to" the last step."""

    metric: str
    since: float
    step: float
    reward_from: float
    reward_to: float
    metric_from: float
    metric_to: float

    @property
    def sentence(self) -> str:
        return (
            f"since step {self.since:.0f} the reward rose from {self.reward_from:.2f} to {self.reward_to:.2f}, while "
            f"{self.metric} fell from {self.metric_from:.2f} to {self.metric_to:.2f}: look at the successes of the "
            "clusters that grow, and change the measure that they exploit"
        )


class _Row(NamedTuple):
    """A step, or the means of some steps."""

    step: float
    reward: float
    check: float
    size: float  # rollouts


def find_alarms(steps: Sequence[float], reward: Series, checks: Mapping[str, Series], counts: Series) -> list[Alarm]:
    """An alarm for each check metric that has fallen by more than chance allows while the reward rose.

    Values are means over the `counts` rollouts of a step; None where a step has none.
    """
    alarms = []
    for name, values in checks.items():
        every = zip(steps, reward, values, counts, strict=True)
        rows = [_Row(step, r, c, size or 1.0) for step, r, c, size in every if r is not None and c is not None]
        if alarm := _alarm(name, rows):
            alarms.append(alarm)
    return alarms


def _alarm(metric: str, rows: Sequence[_Row]) -> Alarm | None:
    window = _window(len(rows))
    if len(rows) < 2 * window:
        return None
    columns = [rows[end - window : end] for end in range(window, len(rows) + 1)]
    smooth = [_Row(part[-1].step, *(fmean(c) for c in list(zip(*part, strict=True))[1:])) for part in columns]
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
    return Alarm(metric, since.step, noticed, since.reward, last.reward, since.check, last.check)


def _window(steps: int) -> int:
    return max(2, math.ceil(_WINDOW_SHARE * steps))


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """What decides the shape of a rollout. `success`: all rewarded measures passed."""

    id: int
    step: int
    success: bool
    tools: tuple[str, ...]
    tokens: int
    text: str
    checks: Mapping[str, bool] = field(default_factory=dict)  # verdicts of the check metrics

    @property
    def confirmed(self) -> bool | None:
        """Whether all check metrics pass; None without any."""
        return all(self.checks.values()) if self.checks else None


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of success."""

    tools: tuple[str, ...]
    length: str  # short, usual or long, relative to the first successes
    phrase: str | None  # text that has spread

    def __str__(self) -> str:
        tools = " > ".join(self.tools) or "no tools"
        return " · ".join([tools, self.length, *([f'says "{self.phrase}"'] if self.phrase else [])])


@dataclass(frozen=True, slots=True)
class SuccessCluster:
    """Successes of one shape. `share` is their share of each step's successes, `growth` its gain from early to late."""

    shape: Shape
    members: tuple[AttemptSummary, ...]  # oldest first
    share: tuple[float, ...]
    growth: float
    confirmed_rate: float | None  # share that the check metrics confirm


@dataclass(frozen=True, slots=True)
class Suspect:
    attempt: AttemptSummary
    score: float
    why: tuple[str, ...]


def find_clusters(attempts: Sequence[AttemptSummary]) -> tuple[list[int], list[SuccessCluster]]:
    """The steps, and the successes by shape, the fastest growing first."""
    steps = sorted({attempt.step for attempt in attempts})
    successes = [attempt for attempt in attempts if attempt.success]
    if not successes:
        return steps, []
    window = _window(len(steps))
    early, late = set(steps[:window]), set(steps[-window:])
    phrases = spreading_phrases(attempts, early, late)
    usual = median([a.tokens for a in successes if a.step in early] or [a.tokens for a in successes])
    members: dict[Shape, list[AttemptSummary]] = {}
    for attempt in successes:
        text = f" {' '.join(_words(attempt.text))} "
        length = "short" if attempt.tokens < usual / 2 else "long" if attempt.tokens > 2 * usual else "usual"
        phrase = next((phrase for phrase in phrases if f" {phrase} " in text), None)
        tools = attempt.tools[:_MAX_TOOLS] + (("…",) if len(attempt.tools) > _MAX_TOOLS else ())
        members.setdefault(Shape(tools, length, phrase), []).append(attempt)
    totals = Counter(attempt.step for attempt in successes)

    def cluster(shape: Shape, own: list[AttemptSummary]) -> SuccessCluster:
        counts = Counter(attempt.step for attempt in own)
        verdicts = [attempt.confirmed for attempt in own if attempt.confirmed is not None]

        def share(window: Collection[int]) -> float:
            return sum(counts[step] for step in window) / max(1, sum(totals[step] for step in window))

        return SuccessCluster(
            shape,
            tuple(sorted(own, key=lambda attempt: attempt.id)),
            tuple(share([step]) for step in steps),
            share(late) - share(early),
            fmean(verdicts) if verdicts else None,
        )

    clusters = [cluster(shape, own) for shape, own in members.items()]
    clusters.sort(key=lambda cluster: (cluster.growth, len(cluster.members)), reverse=True)
    return steps, clusters[:_MAX_CLUSTERS]


def suspects(clusters: Sequence[SuccessCluster], limit: int = 100, *, has_alarm: bool | None = None) -> list[Suspect]:
    """The successes to read first: those of a shape that spreads, which a check metric disputes.

    Without a verdict of a check metric, a success is listed if there is an alarm. `has_alarm` None: the run has no
    check metric at all; then shapes that do less than others or share a phrase are listed (learning to use tools is
    not odd).
    """
    any_tools = any(cluster.shape.tools for cluster in clusters)
    listed = []
    for cluster in clusters:
        if cluster.growth < _MIN_GROWTH:
            continue
        shape = cluster.shape
        is_odd = shape.phrase is not None or shape.length == "short" or (any_tools and not shape.tools)
        unchecked = is_odd if has_alarm is None else has_alarm
        doubt = 1.0 - cluster.confirmed_rate if cluster.confirmed_rate is not None else 0.5
        now = fmean(cluster.share[-_window(len(cluster.share)) :])
        reasons = [f"its kind ({shape}) grew by {cluster.growth:.0%}, to {now:.0%} of the successes"]
        if cluster.confirmed_rate is not None and cluster.confirmed_rate < 0.5:
            reasons.append(f"check metrics confirm {cluster.confirmed_rate:.0%} of them")
        for attempt in cluster.members:
            if attempt.confirmed is False or (attempt.confirmed is None and unchecked):
                score = cluster.growth * doubt * (1.0 if attempt.confirmed is None else 2.0)
                failed = [f"the check metric {name} says no" for name, passed in attempt.checks.items() if not passed]
                listed.append(Suspect(attempt, score, (*reasons, *failed)))
    listed.sort(key=lambda suspect: (suspect.score, suspect.attempt.id), reverse=True)
    return listed[:limit]


def spreading_phrases(attempts: Sequence[AttemptSummary], early: set[int], late: set[int]) -> list[str]:
    """Up to four words (numbers count as #) whose share of the successes has grown most, and which late failures lack.

    Of phrases that spread together, the longest.
    """
    failures = [a for a in attempts if not a.success and a.step in late]
    before = _phrase_shares([a for a in attempts if a.success and a.step in early])
    after, failed = _phrase_shares([a for a in attempts if a.success and a.step in late]), _phrase_shares(failures)
    scored = []
    for phrase, share in after.items():
        growth = share - before.get(phrase, 0.0)
        lift = share - failed.get(phrase, 0.0) if failures else growth
        if min(growth, lift) >= _MIN_GROWTH:
            scored.append((round(min(growth, lift), 2), phrase.count(" "), phrase))
    chosen: list[str] = []
    for _, _, phrase in sorted(scored, reverse=True):
        if not any(f" {phrase} " in f" {other} " or f" {other} " in f" {phrase} " for other in chosen):
            chosen.append(phrase)
    return chosen[:_MAX_PHRASES]


def _phrase_shares(attempts: Sequence[AttemptSummary]) -> dict[str, float]:
    """The share of the attempts that contain each phrase."""
    counts: Counter[str] = Counter()
    for attempt in attempts:
        words = _words(attempt.text)
        starts = [(start, length) for length in range(1, _MAX_WORDS + 1) for start in range(len(words) - length + 1)]
        counts.update({" ".join(words[start : start + length]) for start, length in starts})
    return {phrase: count / len(attempts) for phrase, count in counts.items()}


def _words(text: str) -> list[str]:
    return _WORD.findall(_DIGITS.sub("0", text.lower()))[:100]
