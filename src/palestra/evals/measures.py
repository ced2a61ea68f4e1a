"""Measures: functions that look at a finished attempt and say how good it was, and why."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

from palestra.core.calls import call_user_code
from palestra.core.errors import InputError, NotFoundError, PalestraError, RolloutError, SettingError, did_you_mean
from palestra.core.types import Message, Problem, ProgramResult, Score, ToolCall, ToolResult

_EXAMPLE = """
    @measure
    def right_answer(ctx):
        return ctx.expect in ctx.final_assistant_message.text"""


@dataclass(frozen=True)
class MeasureContext:
    """What a measure sees: the whole conversation, the tools' answers, and what was expected."""

    messages: Sequence[Message]
    tool_results: Sequence[ToolResult] = ()
    expect: Any = None
    case: Problem = field(default_factory=lambda: Problem("", ""))
    context: Any = None  # what the suite's context_fn made for this attempt, as the tools left it
    program: ProgramResult | None = None  # where the agent is a program: its output, its result, its exit status
    # the last conversation of each labelled agent
    agents: Mapping[str, Sequence[Message]] = field(default_factory=dict)

    @property
    def final_assistant_message(self) -> Message:
        """The last thing that the assistant said; an empty message when it said nothing."""
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message
        return Message("assistant", "")

    @property
    def turns(self) -> tuple[Message, ...]:
        """What the model said in this attempt, message after message: what `turn_scores` has a value for each of."""
        given = 0 if isinstance(self.case.input, str) else sum(m.role == "assistant" for m in self.case.input)
        return tuple(m for m in self.messages if m.role == "assistant")[given:]

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Every call that the assistant asked for, in order, also those that could not be read."""
        return tuple(call for m in self.messages if m.role == "assistant" for call in m.tool_calls)


@dataclass(frozen=True)
class Measure:
    """A named measure. A value of at least `threshold` counts as passed.

    With `group`, the function takes the contexts of all attempts at a case, and returns a list with a verdict for each.
    """

    name: str
    fn: Callable[..., Any]
    threshold: float = 1.0
    bounded: bool = True  # values are from 0 to 1
    group: bool = False
    timeout_s: float | None = None  # where it has a limit of its own

    def __call__(self, context: MeasureContext) -> Any:
        return self.fn(context)


_declared: dict[str, Measure] = {}  # what `measures=["name"]` finds; a later declaration of a name replaces it


@overload
def measure(target: Callable[..., Any], /) -> Measure: ...


@overload
def measure(
    target: str | None = None, /, *, name: str | None = None, threshold: float = 1.0, group: bool = False
) -> Callable[[Callable[..., Any]], Measure]: ...


def measure(
    target: Callable[..., Any] | str | None = None,
    /,
    *,
    name: str | None = None,
    threshold: float = 1.0,
    group: bool = False,
) -> Measure | Callable[[Callable[..., Any]], Measure]:
    """Declare a measure: `@measure`, `@measure("name")`, `@measure(threshold=0.7)` or `@measure(group=True)`."""
    if not 0.0 < threshold <= 1.0:
        raise SettingError(f"threshold={threshold} of a measure; expected above 0 and at most 1")
    given_name = target if isinstance(target, str) else name

    def declare(fn: Callable[..., Any]) -> Measure:
        if not callable(fn):
            raise InputError(f"@measure declares a function, got {fn!r}; for example:\n{_EXAMPLE}")
        declared = Measure(given_name or _name_of(fn), fn, threshold, group=group)
        _declared[declared.name] = declared
        return declared

    return declare(target) if callable(target) else declare


def get_measure(name: str) -> Measure:
    """The measure declared under this name."""
    if name not in _declared:
        names = ", ".join(sorted(_declared))
        known = f"Declared are: {names}." if names else f"None is declared; write one:\n{_EXAMPLE}"
        raise NotFoundError(f"there is no measure {name!r}.{did_you_mean(name, _declared)} {known}")
    return _declared[name]


def as_measure(obj: Any) -> Measure:
    """A measure, the name of a declared one, a plain function or a reward model, as a measure."""
    if isinstance(obj, Measure):
        return obj
    if (combined := getattr(obj, "calculate_combined_reward", None)) is not None:
        fn = lambda ctx: combined(ctx.final_assistant_message.text, ctx.expect)  # noqa: E731
        return Measure(_name_of(obj), fn, bounded=False)
    if isinstance(obj, str):
        return get_measure(obj)
    if callable(obj):
        return Measure(_name_of(obj), obj)
    raise InputError(
        f"{obj!r} is not a measure; pass a function, the name of a declared one, or an object with "
        f"calculate_combined_reward(output, expected_answer):\n{_EXAMPLE}"
    )


def as_measures(objs: Any) -> tuple[Measure, ...]:
    """All as measures; two of one name raise PalestraError. A single one needs no list."""
    one = isinstance(objs, (str, Measure)) or callable(objs) or hasattr(objs, "calculate_combined_reward")
    many = (objs,) if one else tuple(objs)
    measures = tuple(as_measure(obj) for obj in many)
    names = [m.name for m in measures]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"two measures are named {twice!r}; rename one: @measure('another_name')")
    return measures


def pass_reason(text: str = "") -> Score:
    """Passed, and why."""
    return Score(1.0, True, text)


def fail_reason(text: str = "") -> Score:
    """Failed, and why."""
    return Score(0.0, False, text)


def turn_scores(values: Any, *, passed: bool | None = None, reason: str = "") -> Score:
    """A value for each turn of the model, in order; they add up to the score. `passed` is None where the measure does
    not decide that. A measure that returns a list of numbers means the same."""
    try:
        turns = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise InputError(f"turn_scores takes one number for each turn, got {values!r}") from None
    return Score(sum(turns), passed, reason, turns=turns)


async def run_measure(m: Measure, ctx: MeasureContext, timeout_s: float) -> Score:
    """The measure's verdict. One that raises, hangs or returns nonsense gives none, with the error recorded."""
    if m.group:
        return (await run_group_measure(m, [ctx], timeout_s))[0]
    try:
        score: Score = await call_user_code(
            f"measure {m.name}", m.fn, ctx, limit_s=m.timeout_s or timeout_s, then=partial(as_score, m)
        )
        return score
    except RolloutError as error:
        return _failed(str(error))


async def run_group_measure(m: Measure, contexts: Sequence[MeasureContext], timeout_s: float) -> list[Score]:
    """The verdicts of a measure that compares attempts at one case, one each; any other is run on each of them."""
    if not m.group:
        return list(await asyncio.gather(*(run_measure(m, context, timeout_s) for context in contexts)))

    def as_scores(values: Any) -> list[Score]:
        if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == len(contexts):
            return [as_score(m, value) for value in values]
        got = f"{len(values)} verdicts" if isinstance(values, Sequence) else f"a {type(values).__name__}"
        error = f"measure {m.name} returned {got} for {len(contexts)} attempts; return a list with one for each"
        return [_failed(error)] * len(contexts)

    try:
        scores: list[Score] = await call_user_code(
            f"measure {m.name}", m.fn, contexts, limit_s=m.timeout_s or timeout_s, then=as_scores
        )
        return scores
    except RolloutError as error:
        return [_failed(str(error))] * len(contexts)


def as_score(m: Measure, value: Any) -> Score:
    """What a measure returned, as a score; nonsense is an error on record."""
    if isinstance(value, Mapping):
        return _score_by_role(m, value)
    if isinstance(value, list | tuple) or (getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist")):
        try:
            value = turn_scores(value.tolist() if hasattr(value, "tolist") else value)
        except PalestraError as error:
            return _failed(f"measure {m.name}: {error}")
    if isinstance(value, Score) and value.turns:
        wrong = next((turn for turn in value.turns if not math.isfinite(turn)), None)
        return value if wrong is None else _failed(f"measure {m.name} gave {wrong} for a turn; expected finite numbers")
    if isinstance(value, Score):
        if value.error:
            return value
        good = isinstance(value.value, (int, float)) and 0.0 <= value.value <= 1.0
        return value if good else _failed(f"measure {m.name} gave a score of {value.value!r}; expected 0 to 1")
    if hasattr(value, "item") and not isinstance(value, (int, float, Mapping)):
        try:
            value = value.item()  # a NumPy or torch scalar
        except (ValueError, RuntimeError):
            return _failed(f"measure {m.name} returned an array of several values; expected one number")
    if isinstance(value, bool):
        return Score(float(value), value)
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or (m.bounded and not 0.0 <= value <= 1.0):
            expected = "a number from 0 to 1" if m.bounded else "a finite number"
            return _failed(f"measure {m.name} returned {value!r}; expected {expected}")
        return Score(float(value), value >= m.threshold - 1e-9)
    return _failed(
        f"measure {m.name} returned {type(value).__name__}; expected pass_reason(…), fail_reason(…), a bool or a number"
    )


def _score_by_role(m: Measure, values: Mapping[str, Any]) -> Score:
    """Verdicts on several agents of one attempt, by their roles. The first one decides whether the attempt passed."""
    scores = {str(role): as_score(m, value) for role, value in values.items()}
    if not scores:
        return _failed(f"measure {m.name} returned an empty dict; expected a verdict for each role")
    if failed := next((score for score in scores.values() if score.error), None):
        return failed
    first = next(iter(scores.values()))
    reason = "; ".join(f"{role}: {score.reason or f'{score.value:g}'}" for role, score in scores.items())
    return Score(first.value, first.passed, reason, roles={role: score.value for role, score in scores.items()})


def _failed(reason: str) -> Score:
    return Score(0.0, False, reason, error=True)


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
