"""The capability report: what a model can do before it is trained, in one line."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from palestra.core.types import Rollout
from palestra.evals.rollout_stats import is_judged, rollout_stats


@dataclass(frozen=True, slots=True)
class Capability:
    """How well a model calls tools, and how often it passes. Rates of calls are shares of all tool calls.

    `parsed` counts calls in any format, `other_format` those that are not in the model's own. `unread` is the share of
    attempts with text that looks like a call and could not be parsed. `pass_at` maps k to pass@k.
    """

    attempts: int
    has_tools: bool
    calls_per_attempt: float
    parsed: float
    other_format: float
    formats: tuple[str, ...]
    malformed: float
    unknown_tools: float
    invalid_arguments: float
    tool_errors: float
    unread: float
    truncated: float
    pass_at: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], samples: Iterable[Sequence[Rollout]] = ()) -> Capability:
        """Count the calls of `rollouts`; estimate pass@k from `samples`, several rollouts of each problem."""
        good = [r for r in rollouts if r.error is None]
        formats = Counter(result.call.format for r in good for result in r.tool_results if result.call.format)
        rates = defaultdict(float, rollout_stats(good))
        return cls(
            attempts=len(good),
            has_tools=any(r.tool_names for r in good),
            calls_per_attempt=rates["tool_calls_mean"],
            parsed=1.0 - rates["malformed_call_rate"],
            other_format=rates["other_format_rate"],
            formats=tuple(name for name, _ in formats.most_common()),
            malformed=rates["malformed_call_rate"],
            unknown_tools=rates["unknown_tool_rate"],
            invalid_arguments=rates["invalid_argument_rate"],
            tool_errors=rates["raised_call_rate"],
            unread=rates["unread_call_rate"],
            truncated=rates["truncation_rate"],
            pass_at=pass_at_k(samples),
        )

    def __str__(self) -> str:
        return f"capability: {self.text}"

    @property
    def text(self) -> str:
        count = f"{self.calls_per_attempt:.2g}"
        calls = [f"{count} {'call' if count == '1' else 'calls'} per attempt"] if self.has_tools else ["no tools"]
        if self.calls_per_attempt:
            formats = f" ({', '.join(self.formats)})" if self.formats else ""
            calls += [
                f"{_percent(self.parsed)} parsed",
                f"{_percent(self.other_format)} in another format{formats}",
                f"{_percent(self.unknown_tools)} unknown tools",
                f"{_percent(self.invalid_arguments)} invalid arguments",
                f"{_percent(self.tool_errors)} tool errors",
            ]
        if self.unread:
            calls.append(f"unparsed text like a call in {_percent(self.unread)} of the attempts")
        calls.append(f"{_percent(self.truncated)} truncated")
        passes = ", ".join(f"pass@{k} {_percent(rate)}" for k, rate in self.pass_at.items())
        return "; ".join([", ".join(calls), *([passes] if passes else [])])

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON, with the line as `text`."""
        return asdict(self) | {"pass_at": {str(k): rate for k, rate in self.pass_at.items()}, "text": self.text}


def by_problem(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """The rollouts of each problem."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.problem_id, []).append(rollout)
    return list(groups.values())


def pass_at_k(samples: Iterable[Sequence[Rollout]]) -> dict[int, float]:
    """pass@1 and pass@n, where n is the largest number of samples of one problem.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) for c passes in n samples, averaged over the problems with at least
    k samples. Rollouts that failed with an error do not count. Empty where no measure decides whether a rollout passed.
    """
    verdicts = [[r.passed for r in group if r.error is None and is_judged(r)] for group in samples]
    most = max(map(len, verdicts), default=0)
    rates = {}
    for k in sorted({1, most} - {0}) if most else ():
        rows = [row for row in verdicts if len(row) >= k]
        rates[k] = statistics.fmean(1 - math.comb(len(row) - sum(row), k) / math.comb(len(row), k) for row in rows)
    return rates


def _percent(share: float) -> str:
    """
    >>> _percent(0.0), _percent(0.004), _percent(0.12), _percent(1.0)
    ('0 %', '0.4 %', '12 %', '100 %')
    """
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"
