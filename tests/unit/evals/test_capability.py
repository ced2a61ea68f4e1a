"""The capability report: rates of tool calls, and pass@k."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from palestra.core.types import Message, Rollout, Score, ToolCall, ToolResult, Turn
from palestra.evals.report import Capability, by_problem, pass_at_k
from palestra.evals.rollout_stats import call_problem, has_unread_call, numbers_of, rollout_stats

TOOLS = ("stock", "calculate")


def attempt(
    passed: bool | None = False, *calls: ToolResult, text: str = "", problem: str = "p", **more: Any
) -> Rollout:
    scores = {} if passed is None else {"right": Score(float(passed), passed)}
    turns = (Turn("template", (1,)), Turn("model", (2, 3), (-0.1, -0.1)))
    messages = (Message("user", "How many?"), Message("assistant", text))
    given = {"stop": "answered", "tool_names": TOOLS} | more
    return Rollout(problem, turns, messages, tool_results=calls, scores=scores, **given)


GOOD = ToolResult(ToolCall("c", "stock"), "3")
OTHER = ToolResult(ToolCall("c", "stock", format="json"), "3")
REJECTED = ToolResult(ToolCall("c", "stock", error="write <tool_call>", format="json"), "Error", ok=False)
MALFORMED = ToolResult(ToolCall("c", "", error="no name"), "Error: no name", ok=False)
UNKNOWN = ToolResult(ToolCall("c", "stocks"), "Error: there is no tool 'stocks'", ok=False)
UNFIT = ToolResult(ToolCall("c", "stock"), "Error: missing argument 'item'", ok=False)
RAISED = ToolResult(ToolCall("c", "stock"), "Error: stock raised KeyError", ok=False, raised=True)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (GOOD, None),
        (OTHER, None),
        (REJECTED, "rejected_format"),
        (MALFORMED, "malformed"),
        (UNKNOWN, "unknown_tool"),
        (UNFIT, "invalid_arguments"),
        (RAISED, "raised"),
    ],
)
def test_a_failed_call_has_one_cause(result: ToolResult, problem: str | None) -> None:
    assert call_problem(result, TOOLS) == problem
    assert call_problem(UNFIT, ()) == "unknown_tool", "where there are no tools"


def test_the_line_counts_calls_by_cause_and_attempts_by_outcome() -> None:
    calls = (GOOD, OTHER, OTHER, REJECTED, MALFORMED, UNKNOWN, UNFIT, RAISED)
    capability = Capability.of([attempt(False, *calls), attempt(False, *calls[::-1], stop="truncated")])
    assert str(capability) == (
        "capability: 8 calls per attempt, 88 % parsed, 38 % in another format (json), 12 % unknown tools, "
        "12 % invalid arguments, 12 % tool errors, 50 % truncated"
    )
    assert str(Capability.of([attempt(tool_names=())])) == "capability: no tools, 0 % truncated"
    assert str(Capability.of([attempt()])) == "capability: 0 calls per attempt, 0 % truncated"
    assert Capability.of([attempt(False, GOOD), attempt(error="broken", stop="failed")]).calls_per_attempt == 1.0


def test_pass_at_k_is_the_chance_that_one_of_k_random_samples_passes() -> None:
    verdicts = [[True, False, False, False], [False] * 4, [True, True, False, True]]
    groups = [[attempt(passed) for passed in row] for row in verdicts]
    assert pass_at_k(groups) == {1: pytest.approx(4 / 12), 4: pytest.approx(2 / 3)}
    short = [*groups, [attempt(True), attempt(True, error="broken", stop="failed")]]
    expected = [sum(any(c) for c in combinations(row, 1)) / len(row) for row in [*verdicts, [True]]]
    assert pass_at_k(short)[1] == pytest.approx(sum(expected) / 4), "an attempt with an error is no sample"
    assert pass_at_k(short)[4] == pytest.approx(2 / 3), "a problem with fewer samples does not count"
    assert pass_at_k([[attempt(None), attempt(None)]]) == {} == pass_at_k([]), "nothing decides about passing"


def test_the_numbers_go_into_json_with_the_line() -> None:
    rollouts = [attempt(True, GOOD, problem="a"), attempt(False, OTHER, problem="a"), attempt(problem="b")]
    data = json.loads(json.dumps(Capability.of(rollouts, by_problem(rollouts)).to_dict()))
    assert data["pass_at"] == {"1": 0.25, "2": 1.0}
    assert data["formats"] == ["json"]
    assert data["text"].endswith("pass@1 25 %, pass@2 100 %")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('```json\n{"name": "stock", "arguments": {"item": "clamp"}}\n```', True),
        ("<function=calculate>", True),
        ("calculate(2, '+', 3)", True),
        ('{"name": "Ada"}', False),
        ("I would calculate (by hand) the stock.", False),
    ],
)
def test_text_like_a_call_of_an_offered_tool_is_noticed(text: str, expected: bool) -> None:
    assert has_unread_call(attempt(text=text)) is expected
    assert not has_unread_call(attempt(text=text, tool_names=())), "nothing is offered"
    assert not has_unread_call(attempt(False, GOOD, text=text)), "a call was parsed"
    assert rollout_stats([attempt(text=text), attempt()])["unread_call_rate"] == expected / 2


def test_a_call_that_the_attempt_ended_before_is_not_run() -> None:
    asked = Message("assistant", "", (ToolCall("c", "stock"),))
    unrun = attempt(stop="tool_limit")
    unrun = Rollout("p", unrun.turns, (Message("user", "?"), asked), "tool_limit", tool_names=TOOLS)
    assert numbers_of(unrun)["unrun_call_rate"]
    example = (Message("user", "?"), asked, Message("tool", "3"), Message("user", "?"), Message("assistant", "3"))
    of_prompt = Rollout("p", unrun.turns, example, "answered", tool_names=TOOLS)
    assert not numbers_of(of_prompt)["unrun_call_rate"]
