"""Pass rates of the training cases, and which cases to sample next: those that the model solves sometimes.

A case that every attempt solves, or none, has no signal: its rollouts cost tokens and teach nothing. Each case has a
Beta posterior over its pass rate. A draw takes one sample p of each posterior, and the cases with the largest p(1 − p):
Thompson sampling, by the variance that makes a group's advantages. Evidence fades with the steps since it was seen,
so solved cases are tested again from time to time, and hopeless ones rest until the model may have become able to
solve them.

    >>> rates = CaseRates(half_life=10)
    >>> rates.add("sum-1", 0, passed=4.0, failed=4.0)
    >>> rates.add("sum-2", 1, passed=8.0, failed=0.0)
    >>> [rates.kind(case, group_size=8) for case in ("sum-1", "sum-2", "sum-3")]
    ['learnable', 'solved', 'untested']
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from palestra.core.types import Group

CaseKind = Literal["untested", "learnable", "solved", "hopeless"]
PRIOR = 0.5  # Jeffreys': Beta(1/2, 1/2)
SETTLED = 0.4  # a whole group at a case is mixed with less than this probability: a few attempts are enough
MIN_RETEST, RETEST_SHARE = 2, 4  # attempts of a re-test: a quarter of a group, and at least two


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about one case."""

    index: int  # among the training cases
    passed: float
    failed: float
    step: int  # when it was last seen


@dataclass(frozen=True, slots=True)
class Choice:
    """A case to sample: its place among the training cases; `retests` one whose outcome is nearly certain."""

    index: int
    retests: bool = False
    is_fresh: bool = False


@dataclass(slots=True)
class CaseRates:
    """The evidence by case id; `half_life` is in training steps."""

    half_life: float
    step: int = 0
    cases: dict[str, Evidence] = field(default_factory=dict)

    def observe(
        self, groups: Sequence[Group], has_signal: Sequence[bool], step: int, place_of: Callable[[str], int | None]
    ) -> None:
        """Add the outcomes of a step's groups. Rollouts that failed by themselves say nothing.

        Where rewards differ though all attempts passed, or none did, there is something to learn: they count as half.
        """
        self.step = step
        for group, signal in zip(groups, has_signal, strict=True):
            good = [rollout.passed for rollout in group.rollouts if rollout.error is None]
            place = place_of(group.problem_id)
            if place is None:
                continue
            passed = float(sum(good))
            if good and passed in (0.0, float(len(good))) and signal:
                passed = len(good) / 2
            self.add(group.problem_id, place, passed=passed, failed=len(good) - passed)

    def add(self, case: str, index: int, *, passed: float, failed: float) -> None:
        known = self.cases.get(case)
        if known is not None:
            factor = self._fading(known)
            passed, failed = passed + factor * known.passed, failed + factor * known.failed
        self.cases[case] = Evidence(index, passed, failed, self.step)

    def choose(
        self, count: int, fresh: Sequence[int], key: str, group_size: int, without: Collection[str] = ()
    ) -> list[Choice]:
        """`count` cases of those that were seen and `fresh` ones, which were not; the same key gives the same choice.

        No case is chosen twice, and none of `without`, unless there are too few. Fresh ones are chosen in their order.
        """
        rng = random.Random(f"learnable/{key}")
        seen = [case for case in self.cases if case not in without]
        if not seen and not fresh:
            seen = list(self.cases)
        posteriors = [self._posterior(case) for case in seen] + [(PRIOR, PRIOR)] * len(fresh)
        chosen: list[Choice] = []
        taken = 0
        while len(chosen) < count:
            drawn = [rng.betavariate(*posterior) for posterior in posteriors]
            by_variance = sorted(range(len(drawn)), key=lambda at: -drawn[at] * (1.0 - drawn[at]))
            for at in by_variance[: count - len(chosen)]:
                if at >= len(seen):
                    chosen.append(Choice(fresh[taken % len(fresh)], is_fresh=taken < len(fresh)))
                    taken += 1
                else:
                    retests = self.kind(seen[at], group_size) != "learnable"
                    chosen.append(Choice(self.cases[seen[at]].index, retests))
        return chosen

    def kind(self, case: str, group_size: int) -> CaseKind:
        """Whether a group at this case would likely be mixed, or all of it passes, or none."""
        if case not in self.cases:
            return "untested"
        passed, failed = self._posterior(case)
        if 1.0 - _all_alike(passed, failed, group_size) >= SETTLED:
            return "learnable"
        return "solved" if passed > failed else "hopeless"

    def metrics(self, group_size: int) -> dict[str, float]:
        kinds = Counter(self.kind(case, group_size) for case in self.cases)
        return {f"{kind}_cases": float(kinds[kind]) for kind in ("learnable", "solved", "hopeless")}

    def to_dict(self) -> dict[str, list[float]]:
        return {case: [e.index, e.passed, e.failed, e.step] for case, e in self.cases.items()}

    def load(self, cases: Mapping[str, Sequence[float]], step: int) -> None:
        """Go on from a checkpoint."""
        self.step = step
        self.cases = {case: Evidence(int(i), p, f, int(s)) for case, (i, p, f, s) in cases.items()}

    def _fading(self, evidence: Evidence) -> float:
        return float(0.5 ** ((self.step - evidence.step) / self.half_life))

    def _posterior(self, case: str) -> tuple[float, float]:
        """The parameters of the Beta distribution of a case's pass rate."""
        known = self.cases[case]
        factor = self._fading(known)
        return PRIOR + factor * known.passed, PRIOR + factor * known.failed


def retest_size(group_size: int) -> int:
    """Attempts at a case whose outcome is nearly certain."""
    return min(group_size, max(MIN_RETEST, group_size // RETEST_SHARE))


def _all_alike(passed: float, failed: float, size: int) -> float:
    """The probability that `size` attempts all pass or all fail, if the pass rate is Beta(passed, failed)."""
    total = passed + failed
    return math.prod((passed + i) / (total + i) for i in range(size)) + math.prod(
        (failed + i) / (total + i) for i in range(size)
    )
