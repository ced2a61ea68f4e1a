"""What an evaluation found: per measure and in all, with 95 % intervals, and before against after."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from palestra.core.types import Message, Rollout
from palestra.evals.rollout_stats import rollout_stats


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


_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Rate:
    """A share of passed attempts with its Wilson 95 % interval."""

    n: int
    passed: int
    rate: float
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.rate

    def __str__(self) -> str:
        """
        >>> str(Rate.of(30, 100)), str(Mean.of([0.5, 0.7]))
        ('30.0 % (21.9–39.6)', '0.600 (0.500–0.700)')
        """
        return f"{100 * self.rate:.1f} % ({100 * self.low:.1f}–{100 * self.high:.1f})"

    @classmethod
    def of(cls, passed: int, n: int) -> Rate:
        if n == 0:
            return cls(0, 0, 0.0, 0.0, 1.0)
        share, z2 = passed / n, _Z95**2
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        reach = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
        low = 0.0 if passed == 0 else middle - reach  # exact where rounding would say 1e-17
        high = 1.0 if passed == n else middle + reach
        return cls(n, passed, share, low, high)


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval, and the range of the values."""

    n: int
    value: float
    low: float
    high: float
    lowest: float
    highest: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}–{self.high:.3f})"

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        if not values:
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        mean, lowest, highest = statistics.fmean(values), min(values), max(values)
        reach = _Z95 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return cls(len(values), mean, max(lowest, mean - reach), min(highest, mean + reach), lowest, highest)


@dataclass(frozen=True)
class MeasureReport:
    """One measure over all rollouts; rollouts in which the measure itself failed count only in `errors`."""

    name: str
    pass_rate: Rate
    mean: Mean
    graded: bool  # it gives values between failed and passed, so that its mean says more than its pass rate
    errors: int

    @property
    def mean_value(self) -> float:
        return self.mean.value


@dataclass(frozen=True)
class EvalReport:
    """An evaluation as numbers. `pass_rate` counts rollouts in which every measure with a weight passed.

    A verdict of a measure that failed by itself (a judge that cannot be reached) is left out.
    """

    pass_rate: Rate
    measures: tuple[MeasureReport, ...]
    reward: Mean
    truncation_rate: float
    failure_rate: float
    tool_calls_per_rollout: float
    tool_error_rate: float
    seconds: float
    rollouts: tuple[Rollout, ...] = field(default=(), repr=False)
    split: Literal["held_out", "train"] = "held_out"  # which cases were scored

    @classmethod
    def of(
        cls, rollouts: Sequence[Rollout], seconds: float, split: Literal["held_out", "train"] = "held_out"
    ) -> EvalReport:
        judged = [r for r in rollouts if not any(s.error and s.decides for s in r.scores.values())]
        results = [result for rollout in rollouts for result in rollout.tool_results]
        measures = []
        for name in dict.fromkeys(name for rollout in rollouts for name in rollout.scores):
            every = [rollout.scores[name] for rollout in rollouts if name in rollout.scores]
            scores = [score for score in every if not score.error]
            verdicts = [score.passed for score in scores if score.passed is not None]
            passed, mean = Rate.of(sum(verdicts), len(verdicts)), Mean.of([score.value for score in scores])
            graded = any(score.value not in (0.0, 1.0) for score in scores)
            measures.append(MeasureReport(name, passed, mean, graded, len(every) - len(scores)))
        return cls(
            pass_rate=Rate.of(sum(rollout.passed for rollout in judged), len(judged)),
            measures=tuple(measures),
            reward=Mean.of([rollout.reward for rollout in judged]),
            truncation_rate=_mean([rollout.cut_off for rollout in rollouts]),
            failure_rate=_mean([rollout.stop == "failed" for rollout in rollouts]),
            tool_calls_per_rollout=len(results) / max(len(rollouts), 1),
            tool_error_rate=_mean([not result.ok for result in results]),
            seconds=seconds,
            rollouts=tuple(rollouts),
            split=split,
        )

    @property
    def mean_reward(self) -> float:
        return self.reward.value

    def to_dict(self) -> dict[str, Any]:
        """Numbers and texts, for JSON; the rollouts stay out."""
        data = asdict(replace(self, rollouts=()))
        for measure, report in zip(data["measures"], self.measures, strict=True):
            measure["mean_value"] = report.mean_value
        return data | {"mean_reward": self.mean_reward}


@dataclass(frozen=True)
class Change:
    """One line of a before/after table. `clear` says that the intervals do not overlap."""

    name: str
    before: Rate | Mean
    after: Rate | Mean

    @property
    def gain(self) -> float:
        return self.after.value - self.before.value

    @property
    def clear(self) -> bool:
        return self.after.low > self.before.high or self.after.high < self.before.low


def compare(before: EvalReport, after: EvalReport) -> list[Change]:
    """A row per measure that both have, then one for all measures together."""
    earlier = {report.name: report.pass_rate for report in before.measures}
    rows = [Change(m.name, earlier[m.name], m.pass_rate) for m in after.measures if m.name in earlier and m.pass_rate.n]
    return [*rows, Change(overall_name(after), before.pass_rate, after.pass_rate)]


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
    verdicts = [[r.passed for r in group if r.error is None and r.verdict is not None] for group in samples]
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


def overall_name(report: EvalReport) -> str:
    """What the row for all measures together is called; those of weight 0 are not in it."""
    has_check_metric = any(not score.counts for rollout in report.rollouts for score in rollout.scores.values())
    return "all rewarded measures" if has_check_metric else "all measures"


def compare_means(before: EvalReport, after: EvalReport) -> list[Change]:
    """One row per graded measure in both reports, then one for the reward, unless the reward is only pass or fail."""
    graded = {m.name for report in (before, after) for m in report.measures if m.graded}
    earlier = {m.name: m.mean for m in before.measures if m.name in graded}
    others = [m for m in after.measures if m.name in earlier and m.name != "reward"]  # which is the last row
    rows = [Change(m.name, earlier[m.name], m.mean) for m in others]
    rollouts = (*before.rollouts, *after.rollouts)
    says_more = earlier or any(r.reward != float(r.passed) for r in rollouts if r.error is None)
    return [*rows, Change("reward", before.reward, after.reward)] if says_more else []


def pick_transcripts(before: Sequence[Rollout], after: Sequence[Rollout], n: int = 3) -> list[tuple[Rollout, Rollout]]:
    """Up to n pairs (before, after) of the same problem: first one that failed and passes now, then one of
    each other kind (fails still, passed already, got worse), then those whose questions are least like these."""
    later: dict[str, Rollout] = {}
    for rollout in after:
        later.setdefault(rollout.problem_id, rollout)
    pairs: dict[str, tuple[Rollout, Rollout]] = {}
    for rollout in before:
        if rollout.problem_id in later:
            pairs.setdefault(rollout.problem_id, (rollout, later[rollout.problem_id]))
    kinds = [(False, True), (False, False), (True, True), (True, False)]
    of_kind = [[p for p in pairs.values() if (p[0].passed, p[1].passed) == kind] for kind in kinds]
    firsts = [group[0] for group in of_kind if group][:n]
    rest = [pair for group in of_kind for pair in group[1:]]
    while rest and len(firsts) < n:
        seen = [_words(after) for _, after in firsts]
        overlaps = []  # the largest share of words in common with one that is chosen
        for words in [_words(after) for _, after in rest]:
            overlaps.append(max((len(words & s) / max(1, len(words | s)) for s in seen), default=0.0))
        firsts.append(rest.pop(overlaps.index(min(overlaps))))
    return firsts


def opening(messages: Sequence[Message], *, with_system: bool = False) -> list[Message]:
    """What was said before the model's first word: the question."""
    first_answer = next((i for i, m in enumerate(messages) if m.role not in ("system", "user")), len(messages))
    return [message for message in messages[:first_answer] if with_system or message.role != "system"]


def _words(rollout: Rollout) -> set[str]:
    return {word for message in opening(rollout.messages) for word in message.text.lower().split()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
