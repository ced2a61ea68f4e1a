"""Is a rising reward real? Witnesses against rewards, and successes that have become alike.

A *witness* is a measure that is not rewarded (weight 0), or a held-out score. No detector sees a hack by the reward
alone: a reward that rises is what training is for. What tells the two apart is a witness that falls meanwhile; and what
to read first is the kind of success that spreads fastest, above all where the witness does not confirm it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

Series = Sequence[float | None]

_SIGMAS = 3.5  # of the fall of a witness: the largest of many differences is large by chance
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
    """A witness fell while the reward rose: since its best step, noticed at `step`; the values are at the last step."""

    witness: str
    since: float
    step: float
    reward_from: float
    reward_to: float
    witness_from: float
    witness_to: float

    @property
    def sentence(self) -> str:
        return (
            f"since step {self.since:.0f} the reward rose from {self.reward_from:.2f} to {self.reward_to:.2f}, while "
            f"{self.witness} fell from {self.witness_from:.2f} to {self.witness_to:.2f}: look at the successes of the "
            "clusters that grow, and change the measure that they exploit"
        )


def find_alarms(steps: Sequence[float], reward: Series, witnesses: Mapping[str, Series], counts: Series) -> list[Alarm]:
    """One for each witness that has fallen by more than chance allows, the reward having risen.

    Values are means over the `counts` rollouts of a step; None where a step has none.
    """
    found = []
    for name, values in witnesses.items():
        every = zip(steps, reward, values, counts, strict=True)
        rows = [_Row(step, r, w, size or 1.0) for step, r, w, size in every if r is not None and w is not None]
        if alarm := _alarm(name, rows):
            found.append(alarm)
    return found


class _Row(NamedTuple):
    step: float
    reward: float
    witness: float
    size: float  # rollouts


def _alarm(witness: str, rows: Sequence[_Row]) -> Alarm | None:
    window = _window(len(rows))
    if len(rows) < 2 * window:
        return None
    smooth = [_mean(rows[end - window : end]) for end in range(window, len(rows) + 1)]
    rewards = [row.reward for row in smooth]
    least_rise = _MIN_RISE * ((max(rewards) - min(rewards)) or 1.0)
    best, since, noticed = smooth[0], None, 0.0
    for row in smooth:
        best = max(best, row, key=lambda each: each.witness)
        fell = best.witness - row.witness >= _least_fall(best.witness, row.witness, window * row.size)
        if fell and row.reward - best.reward > least_rise:
            noticed = row.step if since is None else noticed
            since = best
    if since is None:
        return None
    last = smooth[-1]
    return Alarm(witness, since.step, noticed, since.reward, last.reward, since.witness, last.witness)


def _mean(rows: Sequence[_Row]) -> _Row:
    """The means of some steps, at the last of them."""
    reward, witness, size = (fmean(column) for column in list(zip(*rows, strict=True))[1:])
    return _Row(rows[-1].step, reward, witness, size)


def _least_fall(before: float, after: float, size: float) -> float:
    share = min(1.0, max(0.0, (before + after) / 2))
    return max(_MIN_FALL, _SIGMAS * math.sqrt(max(share * (1 - share), 0.01) * 2 / size))


def _window(steps: int) -> int:
    return max(2, math.ceil(_WINDOW_SHARE * steps))


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """A rollout, as far as its shape goes. `success`: all that is rewarded passed."""

    id: int
    step: int
    success: bool
    tools: tuple[str, ...]
    tokens: int
    text: str
    witnesses: Mapping[str, bool] = field(default_factory=dict)

    @property
    def confirmed(self) -> bool | None:
        """Whether all witnesses agree; None without any."""
        return all(self.witnesses.values()) if self.witnesses else None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a success looks like."""

    tools: tuple[str, ...]
    length: str  # short, usual or long, against the first successes
    phrase: str | None  # text that has spread

    def __str__(self) -> str:
        tools = " > ".join(self.tools) or "no tools"
        return " · ".join([tools, self.length, *([f'says "{self.phrase}"'] if self.phrase else [])])


@dataclass(frozen=True, slots=True)
class SuccessCluster:
    """Successes of one shape. `share` is theirs of the successes of each step, `growth` its gain from early to late."""

    shape: Shape
    members: tuple[AttemptSummary, ...]  # oldest first
    share: tuple[float, ...]
    growth: float
    witness_rate: float | None  # how many of them the witnesses confirm


@dataclass(frozen=True, slots=True)
class Suspect:
    attempt: AttemptSummary
    score: float
    why: tuple[str, ...]


def find_clusters(attempts: Sequence[AttemptSummary]) -> tuple[list[int], list[SuccessCluster]]:
    """The steps, and the successes by shape: those that grow fastest first."""
    steps = sorted({attempt.step for attempt in attempts})
    successes = [attempt for attempt in attempts if attempt.success]
    if not successes:
        return steps, []
    window = _window(len(steps))
    early, late = set(steps[:window]), set(steps[-window:])
    phrases = spreading_phrases(attempts, early, late)
    first = [a.tokens for a in successes if a.step in early] or [a.tokens for a in successes]
    usual = median(first)
    members: dict[Shape, list[AttemptSummary]] = {}
    for attempt in successes:
        members.setdefault(_shape(attempt, phrases, usual), []).append(attempt)
    totals = Counter(attempt.step for attempt in successes)
    clusters = [_cluster(shape, found, steps, totals, early, late) for shape, found in members.items()]
    clusters.sort(key=lambda cluster: (cluster.growth, len(cluster.members)), reverse=True)
    return steps, clusters[:_MAX_CLUSTERS]


def suspects(clusters: Sequence[SuccessCluster], limit: int = 100, *, has_alarm: bool | None = None) -> list[Suspect]:
    """The successes to read first: of a shape that spreads, and disputed by a witness.

    A success without a verdict of a witness is listed if an alarm was raised, or (`has_alarm` None: the run has no
    witness at all) if its shape is one that cheats have: see `_is_odd`.
    """
    any_tools = any(cluster.shape.tools for cluster in clusters)
    found = []
    for cluster in clusters:
        if cluster.growth < _MIN_GROWTH:
            continue
        unwitnessed = _is_odd(cluster.shape, any_tools) if has_alarm is None else has_alarm
        doubt = 1.0 - cluster.witness_rate if cluster.witness_rate is not None else 0.5
        for attempt in cluster.members:
            if attempt.confirmed is False or (attempt.confirmed is None and unwitnessed):
                score = cluster.growth * doubt * (1.0 if attempt.confirmed is None else 2.0)
                found.append(Suspect(attempt, score, tuple(_why(cluster, attempt))))
    found.sort(key=lambda suspect: (suspect.score, suspect.attempt.id), reverse=True)
    return found[:limit]


def _is_odd(shape: Shape, any_tools: bool) -> bool:
    """Whether successes of a shape do less than others, or share a phrase; learning to use tools is not odd."""
    return shape.phrase is not None or shape.length == "short" or (any_tools and not shape.tools)


def spreading_phrases(attempts: Sequence[AttemptSummary], early: set[int], late: set[int]) -> list[str]:
    """Runs of up to four words (numbers count as #) whose share of the successes has grown most, and which the
    failures of the same time lack. Of runs that spread together, the longest."""
    groups = {
        "early": [a for a in attempts if a.success and a.step in early],
        "late": [a for a in attempts if a.success and a.step in late],
        "failed": [a for a in attempts if not a.success and a.step in late],
    }
    shares = {name: _phrase_shares(members) for name, members in groups.items()}
    scored = []
    for phrase, share in shares["late"].items():
        growth = share - shares["early"].get(phrase, 0.0)
        lift = share - shares["failed"].get(phrase, 0.0) if groups["failed"] else growth
        if min(growth, lift) >= _MIN_GROWTH:
            scored.append((round(min(growth, lift), 2), phrase.count(" "), phrase))
    chosen: list[str] = []
    for _, _, phrase in sorted(scored, reverse=True):
        if not any(f" {phrase} " in f" {other} " or f" {other} " in f" {phrase} " for other in chosen):
            chosen.append(phrase)
        if len(chosen) == _MAX_PHRASES:
            break
    return chosen


def _phrase_shares(attempts: Sequence[AttemptSummary]) -> dict[str, float]:
    counts = Counter(phrase for attempt in attempts for phrase in _phrases(attempt.text))
    return {phrase: count / len(attempts) for phrase, count in counts.items()}


def _phrases(text: str) -> set[str]:
    words = _words(text)
    return {
        " ".join(words[start : start + count])
        for count in range(1, _MAX_WORDS + 1)
        for start in range(len(words) - count + 1)
    }


def _words(text: str) -> list[str]:
    return _WORD.findall(_DIGITS.sub("0", text.lower()))[:100]


def _shape(attempt: AttemptSummary, phrases: Sequence[str], usual: float) -> Shape:
    text = f" {' '.join(_words(attempt.text))} "
    length = "short" if attempt.tokens < usual / 2 else "long" if attempt.tokens > 2 * usual else "usual"
    phrase = next((phrase for phrase in phrases if f" {phrase} " in text), None)
    tools = attempt.tools[:_MAX_TOOLS] + (("…",) if len(attempt.tools) > _MAX_TOOLS else ())
    return Shape(tools, length, phrase)


def _cluster(
    shape: Shape, members: list[AttemptSummary], steps: list[int], totals: Counter[int], early: set[int], late: set[int]
) -> SuccessCluster:
    counts = Counter(attempt.step for attempt in members)
    verdicts = [attempt.confirmed for attempt in members if attempt.confirmed is not None]

    def share(window: set[int]) -> float:
        return sum(counts[step] for step in window) / max(1, sum(totals[step] for step in window))

    return SuccessCluster(
        shape,
        tuple(sorted(members, key=lambda attempt: attempt.id)),
        tuple(counts[step] / max(1, totals[step]) for step in steps),
        share(late) - share(early),
        fmean(verdicts) if verdicts else None,
    )


def _why(cluster: SuccessCluster, attempt: AttemptSummary) -> list[str]:
    now = fmean(cluster.share[-_window(len(cluster.share)) :])
    reasons = [f"its kind ({cluster.shape}) grew by {cluster.growth:.0%}, to {now:.0%} of the successes"]
    if cluster.witness_rate is not None and cluster.witness_rate < 0.5:
        reasons.append(f"witnesses confirm {cluster.witness_rate:.0%} of them")
    reasons += [f"the witness {name} says no" for name, passed in attempt.witnesses.items() if not passed]
    return reasons
