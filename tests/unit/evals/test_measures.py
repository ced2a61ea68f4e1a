"""Measures: what they see, what their verdicts become, and how they are declared."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from palestra.core import calls
from palestra.core.errors import NotFoundError, PalestraError
from palestra.core.types import Message, Problem, Score, ToolCall, ToolResult
from palestra.evals.measures import (
    Measure,
    MeasureContext,
    as_measure,
    as_measures,
    fail_reason,
    get_measure,
    measure,
    pass_reason,
    run_measure,
)

CONTEXT = MeasureContext(
    messages=(
        Message("user", "2 + 2?"),
        Message("assistant", "", (ToolCall("call_0", "add", {"a": 2, "b": 2}),)),
        Message("tool", "4", tool_call_id="call_0"),
        Message("assistant", "It is 4."),
    ),
    tool_results=(ToolResult(ToolCall("call_0", "add"), "4"),),
    expect="4",
    case=Problem("sum-0", "2 + 2?", "4", {"input": "2 + 2?", "level": 1}),
)


def score(fn, timeout_s=5.0, **options) -> Score:
    return asyncio.run(run_measure(Measure("m", fn, **options), CONTEXT, timeout_s))


def test_the_context_shows_the_end_the_calls_and_the_record():
    assert CONTEXT.final_assistant_message.text == "It is 4."
    assert [call.name for call in CONTEXT.tool_calls] == ["add"]
    assert CONTEXT.case.row["level"] == 1
    silent = MeasureContext(messages=(Message("user", "hi"),))
    assert (silent.final_assistant_message, silent.tool_calls) == (Message("assistant", ""), ())


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, Score(1.0, True)),
        (False, Score(0.0, False)),
        (1, Score(1.0, True)),
        (0.4, Score(0.4, False)),
        (0.99, Score(0.99, False)),
        (1.0 - 1e-12, Score(1.0 - 1e-12, True)),
        (np.bool_(True), Score(1.0, True)),
        (np.float64(0.5), Score(0.5, False)),
        (np.float32(0.5), Score(0.5, False)),
        (pass_reason("good"), Score(1.0, True, "good")),
        (fail_reason("bad"), Score(0.0, False, "bad")),
    ],
    ids=repr,
)
def test_verdicts_become_scores(returned, expected):
    assert score(lambda ctx: returned) == expected


NONSENSE = [None, "yes", 1.5, -0.1, math.nan, math.inf, ["a"], [math.nan], np.ones((2, 2))]


@pytest.mark.parametrize("returned", [*NONSENSE, Score(2.0, True), Score(math.nan, True)], ids=repr)
def test_nonsense_is_an_error_on_record(returned):
    got = score(lambda ctx: returned)
    assert (got.value, got.passed, got.error) == (0.0, False, True)
    assert "measure m" in got.reason


def test_a_threshold_decides_what_passes_and_async_measures_are_awaited():
    async def slow(ctx):
        await asyncio.sleep(0)
        return ctx.expect in ctx.final_assistant_message.text

    assert score(slow).passed
    assert score(lambda ctx: 0.7, threshold=0.7).passed
    assert not score(lambda ctx: 0.69, threshold=0.7).passed


def test_a_measure_that_raises_exits_or_hangs_scores_zero_and_says_why():
    got = score(lambda ctx: ctx.expect["missing"])
    assert (got.value, got.error) == (0.0, True)
    assert got.reason.startswith("measure m raised TypeError: ")
    assert "raised SystemExit" in score(lambda ctx: sys.exit(1)).reason
    assert "took longer" in score(lambda ctx: time.sleep(1.0), timeout_s=0.02).reason


def test_an_interrupt_that_a_measure_raises_is_no_ctrl_c():
    def interrupted(ctx):
        raise KeyboardInterrupt

    assert score(interrupted).reason == "measure m raised KeyboardInterrupt"


def test_declared_measures_are_found_by_name():
    @measure
    def exactly_right(ctx):
        return True

    @measure("nearly right", threshold=0.5)
    def other(ctx):
        return 0.6

    assert get_measure("exactly_right") is exactly_right
    assert as_measure("nearly right").threshold == 0.5
    assert exactly_right(CONTEXT) is True
    with pytest.raises(NotFoundError, match=r"no measure 'exactly_rigth'\. Did you mean 'exactly_right'\?"):
        get_measure("exactly_rigth")


def test_plain_functions_and_single_ones_will_do():
    def polite(ctx):
        return True

    assert [m.name for m in as_measures(polite)] == [m.name for m in as_measures([polite])] == ["polite"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: as_measures([Measure("same", bool), Measure("same", bool)]), "two measures are named 'same'"),
        (lambda: as_measures([3]), "3 is not a measure"),
        (lambda: measure(threshold=0.0), "threshold"),
        (lambda: measure(threshold=1.5), "threshold"),
    ],
)
def test_what_is_no_measure_is_refused(make, words):
    with pytest.raises(PalestraError, match=words):
        make()


def test_a_reward_model_is_a_measure_and_its_values_may_be_any_number():
    class Taste:
        def calculate_combined_reward(self, output: str, expected_answer: str) -> float:
            return 2.5 if expected_answer in output else -1.0

    (taste,) = as_measures(Taste())
    assert taste.name == "Taste"
    ctx = MeasureContext([Message("assistant", "It is 5.")], expect="5")
    assert asyncio.run(run_measure(taste, ctx, 1.0)) == Score(2.5, True)
    assert asyncio.run(run_measure(taste, replace(ctx, expect="6"), 1.0)) == Score(-1.0, False)


def test_a_measure_for_which_there_is_no_thread_left_gets_no_score(monkeypatch):
    monkeypatch.setattr(calls, "MAX_HUNG_CALLS", -1)
    over = threading.Event()
    with pytest.raises(calls.OutOfThreads):
        score(lambda ctx: over.wait(30), timeout_s=0.1)
    over.set()
