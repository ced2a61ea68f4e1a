"""Reading numbers out of answers."""

from __future__ import annotations

import re

from palestra.core.types import Score
from palestra.evals.measures import fail_reason, pass_reason

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """
    >>> last_number("It was 3, and is 1,204.50 now.")
    1204.5
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def is_number(answer: str, expected: float) -> Score:
    """Passed when the last number of the answer is the expected one."""
    number = last_number(answer)
    if number is None:
        return fail_reason("the answer names no number")
    if abs(number - expected) > 1e-6 * max(1.0, abs(expected)):
        return fail_reason(f"the answer says {number:g}, expected {expected:g}")
    return pass_reason(f"the answer says {expected:g}")
