"""What the metrics of a run say about why nothing is learned: one sentence, and the setting to change."""

from __future__ import annotations

from typing import Any

import pytest

from palestra.core.config import RunConfig
from palestra.core.types import Rollout, Score, StopReason, ToolCall, ToolResult, Turn
from palestra.evals.findings import Finding, broken_tool, evaluation_findings, recorded_findings, run_findings
from palestra.evals.rollout_stats import loops, rollout_stats

GOOD = {
    "rollouts": 16.0, "rollout_failures": 0.0, "measure_errors": 0.0, "reward_mean": 0.5, "reward_min": 0.0,
    "reward_max": 1.0, "pass_rate": 0.5, "equal_reward_groups": 0.25, "completion_length_mean": 80.0,
    "truncation_rate": 0.0, "context_full_rate": 0.0, "looping_rate": 0.0, "tools_offered": 2.0,
    "tool_calls_mean": 1.0, "tool_error_rate": 0.2, "unknown_tool_rate": 0.1, "entropy": 0.5,
}  # fmt: skip


TIMES = {"sample_seconds": 8.0, "train_seconds": 2.0, "decode_seconds": 1.0}  # of a run that samples by its own engine


def steps(count: int, **changes: float) -> list[dict[str, float]]:
    return [GOOD | changes for _ in range(count)]


def kinds(rows: list[dict[str, float]], **more: Any) -> list[str]:
    return [finding.kind for finding in run_findings(rows, **more)]


def test_a_run_that_learns_has_no_findings() -> None:
    assert run_findings(steps(10)) == run_findings(steps(10), ended=True) == []
    assert evaluation_findings([rollout(1, 2, calls=(result("add"),))]) == []


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"equal_reward_groups": 1.0, "reward_max": 0.0, "pass_rate": 0.0}, "zero_reward", "earned a reward of 0"),
        ({"equal_reward_groups": 1.0, "pass_rate": 0.5}, "equal_rewards", "the same reward, so nothing was learned"),
        ({"equal_reward_groups": 1.0, "reward_min": 1.0, "pass_rate": 1.0}, "solved", "nothing left to learn"),
        ({"tool_calls_mean": 0.0, "unknown_tool_rate": 0.0}, "no_tool_calls", "no rollout called a tool"),
        ({"unknown_tool_rate": 1.0, "tool_error_rate": 1.0}, "unknown_tools", "100% of the tool calls in the last 5"),
        ({"tool_error_rate": 1.0}, "tool_errors", "100% of the tool calls in the last 5 steps failed"),
        ({"truncation_rate": 0.8}, "truncated", "80% of the rollouts in the last 5 steps were cut off by rollout.max_"),
        ({"truncation_rate": 0.8, "context_full_rate": 0.7}, "context_full", "context (or its KV cache) was full"),
        ({"truncation_rate": 0.8, "looping_rate": 0.6}, "looping", "more tokens would not help"),
        ({"rollout_failures": 8.0}, "rollout_failures", "40 of 80 rollouts in the last 5 steps failed with an error"),
        ({"measure_errors/judge": 1.0}, "measure_errors", "the measure judge failed by itself in 5 of 80 rollouts"),
        ({"hung_calls": 7.0}, "hung_calls", "7 calls of tools or measures"),
        ({"stale_groups_dropped": 3.0, "groups": 4.0}, "stale_groups", "15 of 35 groups in the last 5 steps were"),
        ({"staleness_max": 6.0}, "staleness", "6.0 versions before the weights that learned from them"),
        ({"staleness_max": 1.0, "clip_fraction_high": 0.3}, "staleness", "30% of the tokens were clipped"),
        (TIMES | {"agent_loop_seconds": 7.0}, "idle", "idle for 70% of the time in the last 5 steps"),
    ],
)
def test_each_obstacle_is_named_with_settings_that_exist(changes: dict[str, float], kind: str, words: str) -> None:
    (finding,) = run_findings(steps(6, **changes))
    assert finding.kind == kind
    assert words in finding.sentence
    assert set(finding.settings) <= set(RunConfig.keys())


@pytest.mark.parametrize(
    "usual",
    [
        {"staleness_max": 2.0, "clip_fraction_high": 0.1},
        {"clip_fraction_high": 0.3},  # of several iterations on fresh tokens
        {"stale_groups_dropped": 1.0, "groups": 8.0},
        TIMES | {"agent_loop_seconds": 4.0},
        {"sample_seconds": 8.0, "train_seconds": 2.0, "agent_loop_seconds": 7.9},  # a server samples, and is busy
    ],
)
def test_what_is_usual_in_asynchronous_runs_is_no_finding(usual: dict[str, float]) -> None:
    assert kinds(steps(6, **usual)) == []


def test_tools_that_nobody_offers_are_not_missed() -> None:
    assert kinds(steps(6, tools_offered=0.0, tool_calls_mean=0.0)) == []


def test_a_run_that_goes_on_is_judged_by_its_newest_steps_and_not_before_the_third() -> None:
    idle = steps(2, equal_reward_groups=1.0)
    assert kinds(idle) == []
    assert kinds(idle, ended=True) == ["equal_rewards"]
    assert kinds(steps(3, equal_reward_groups=1.0)) == ["equal_rewards"]
    assert kinds([*steps(9, equal_reward_groups=1.0), *steps(1)]) == []


def test_a_run_that_has_ended_is_judged_as_a_whole() -> None:
    half = [*steps(5, equal_reward_groups=1.0), *steps(5)]
    (finding,) = run_findings(half, ended=True)
    assert "in 5 of 10 steps" in finding.sentence
    assert kinds([*steps(4, equal_reward_groups=1.0), *steps(6)], ended=True) == []


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"completion_length_mean": 8.0}, ["short_answers"]),
        ({"entropy": 0.05}, ["entropy_collapse"]),
        ({"tool_calls_mean": 0.1}, ["tool_collapse"]),
        ({"tool_calls_mean": 0.0}, ["tools_unlearned"]),
        ({"tool_calls_mean": 0.1, "pass_rate": 0.8}, []),
        ({"completion_length_mean": 8.0, "entropy": 0.05, "pass_rate": 0.8}, []),
    ],
)
def test_a_collapse_is_told_unless_the_pass_rate_gained(last: dict[str, float], expected: list[str]) -> None:
    assert kinds([*steps(5), *steps(5, **last)]) == expected


def test_rows_of_evaluations_between_steps_are_passed_over() -> None:
    rows = [row for step in steps(6) for row in (step, {"step": 1.0, "eval/pass_rate": 0.5})]
    assert run_findings(rows, ended=True) == []


def test_a_finding_reads_as_its_sentence_and_goes_into_json() -> None:
    finding = Finding("looping", "It loops.", ("model.name",))
    assert str(finding) == "It loops."
    assert finding.to_dict() == {"kind": "looping", "sentence": "It loops.", "settings": ("model.name",)}


def test_a_run_on_disk_is_judged_by_its_report_or_else_by_its_metrics() -> None:
    idle = steps(4, equal_reward_groups=1.0)
    assert recorded_findings({"findings": [{"sentence": "It loops."}]}, idle, ended=True) == ["It loops."]
    assert "in 4 of 4 steps" in recorded_findings({"agent": "of Palestra 0.1"}, idle, ended=True)[0]
    assert "in the last 4 steps" in recorded_findings(None, idle, ended=False)[0]


# What the rollouts themselves tell.


def rollout(*ids: int, stop: StopReason = "answered", calls: tuple[ToolResult, ...] = (), **more: Any) -> Rollout:
    turns = (Turn("template", (1,)), Turn("model", ids, [-0.1] * len(ids)))  # type: ignore[arg-type]
    return Rollout("p", turns, (), stop, tool_results=calls, tool_names=("add", "search"), **more)


def result(name: str, content: str = "2", ok: bool = True) -> ToolResult:
    return ToolResult(ToolCall("c", name), content, ok, raised=" raised " in content)


def test_stats_tell_why_rollouts_were_cut_off_and_which_tools_do_not_exist() -> None:
    stats = rollout_stats(
        [
            rollout(*range(200), stop="truncated"),
            rollout(*[7, 8, 9] * 60, stop="truncated", calls=(result("add"), result("multiply", ok=False))),
            rollout(1, stop="context_full"),
            rollout(1, 2, error="broken", scores={"judge": Score(0.0, False, "away", error=True)}),
        ]
    )
    rates = ("truncation_rate", "context_full_rate", "looping_rate", "unknown_tool_rate", "tool_error_rate")
    assert [stats[name] for name in rates] == pytest.approx([1.0, 1 / 3, 1 / 3, 0.5, 0.5])
    assert (stats["tools_offered"], stats["measure_errors/judge"], stats["rollout_failures"]) == (2.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (list(range(100)), False),
        ([5] * 100, True),
        ([*range(500), *[1, 2, 3, 4, 5, 6, 7] * 20], True),
        ([1, 2, 1, 2], False),  # too short to tell
        ([], False),
    ],
)
def test_a_repetition_is_seen_at_the_end_of_what_was_sampled(ids: list[int], expected: bool) -> None:
    assert loops(rollout(*ids)) is expected


def test_a_tool_that_fails_always_and_everywhere_in_the_same_words_is_broken() -> None:
    down = result("search", "Error: search raised ConnectionError: refused", ok=False)
    assert broken_tool([rollout(1, calls=(result("add"), down))] * 4) == (
        "the tool search failed in all of its 4 calls, each time with: Error: search raised ConnectionError: refused"
    )
    wrong = [result("search", f"Error: search raised KeyError: {i}", ok=False) for i in range(4)]
    assert broken_tool([rollout(1, calls=(call,)) for call in wrong]) is None, "the model's own mistakes differ"
    misused = result("search", "Error: missing argument 'text'. search takes text: string", ok=False)
    assert broken_tool([rollout(1, calls=(misused,))] * 4) is None, "or are no failure of the tool"
    assert broken_tool([rollout(1, calls=(down,))] * 3 + [rollout(1)]) is None, "one did without"
    assert broken_tool([rollout(1, calls=(down,))] * 3 + [rollout(1, calls=(down, result("search")))]) is None
    assert broken_tool([rollout(1, calls=(result("find", "no", ok=False),))] * 4) is None, "a tool that nobody offers"
