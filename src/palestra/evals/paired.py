"""Two evaluations of the same problems, paired: what changed, and whether by chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paired:
    """How many problems passed in both, in one alone, in neither; the p-value is McNemar's exact one, two-sided."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p_value(self) -> float:
        """
        >>> round(Paired(100, 3, 20, 9).p_value, 6)
        0.000488
        >>> Paired(5, 0, 0, 5).p_value
        1.0
        """
        fewer, changed = min(self.only_first, self.only_second), self.only_first + self.only_second
        tail = sum(math.comb(changed, k) for k in range(fewer + 1))
        return min(1.0, tail / 2 ** (changed - 1)) if changed else 1.0


def pair(first: Mapping[str, bool], second: Mapping[str, bool]) -> Paired:
    """Of the problems that both have; the values say which passed."""
    shared = [(first[problem], second[problem]) for problem in first if problem in second]
    count = {(a, b): shared.count((a, b)) for a in (True, False) for b in (True, False)}
    return Paired(count[True, True], count[True, False], count[False, True], count[False, False])
