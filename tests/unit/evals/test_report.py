import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.types import Rollout, Score, ToolCall, ToolResult, Turn
from palestra.evals.report import EvalReport, Rate, compare, compare_means, pick_transcripts


def rollout(
    problem: str, *passed: bool | None, reward: float = 0.0, stop: str = "answered", tools: tuple[bool, ...] = ()
) -> Rollout:
    """`passed` by measure; None: the measure failed by itself."""
    results = tuple(ToolResult(ToolCall("c", "t"), "", ok=ok) for ok in tools)
    scores = {f"m{i}": Score(float(ok or 0), bool(ok), error=ok is None) for i, ok in enumerate(passed)}
    return Rollout(problem, (Turn("template", (1,)),), (), stop, results, scores, reward)


def test_wilson_interval_has_known_values():
    rate = Rate.of(8, 10)
    assert (round(rate.low, 4), round(rate.high, 4)) == (0.4902, 0.9433)
    assert Rate.of(0, 10).low == 0.0
    assert round(Rate.of(0, 10).high, 4) == 0.2775
    assert Rate.of(10, 10).high == 1.0


@given(st.integers(1, 300), st.data())
def test_an_interval_always_holds_its_rate(n, data):
    rate = Rate.of(data.draw(st.integers(0, n)), n)
    assert 0.0 <= rate.low <= rate.rate + 1e-12
    assert rate.rate - 1e-12 <= rate.high <= 1.0


def test_a_report_counts_measures_tools_and_endings():
    report = EvalReport.of(
        [
            rollout("a", True, True, reward=1.0, tools=(True, False)),
            rollout("b", True, False, reward=0.5, stop="truncated", tools=(True,)),
            rollout("c", False, False, stop="failed"),
            rollout("d", stop="failed"),
        ],
        seconds=3.0,
    )
    assert (report.pass_rate.passed, report.pass_rate.n) == (1, 4)
    assert [(m.name, m.pass_rate.passed, m.pass_rate.n, m.errors) for m in report.measures] == [
        ("m0", 2, 3, 0),
        ("m1", 1, 3, 0),
    ]
    assert report.measures[0].mean_value == pytest.approx(2 / 3)
    assert report.mean_reward == 0.375
    assert (report.truncation_rate, report.failure_rate) == (0.25, 0.5)
    assert report.tool_calls_per_rollout == 0.75
    assert report.tool_error_rate == pytest.approx(1 / 3)
    assert json.loads(json.dumps(report.to_dict()))["pass_rate"]["rate"] == 0.25


def test_a_measure_that_failed_by_itself_is_left_out_and_counted():
    judged = [rollout("a", True, True, reward=1.0), rollout("b", True, False, reward=0.5)]
    report = EvalReport.of([*judged, rollout("c", True, None)], seconds=3.0)
    assert (report.pass_rate.passed, report.pass_rate.n, report.mean_reward) == (1, 2, 0.75)
    assert [(m.pass_rate.n, m.mean_value, m.errors) for m in report.measures] == [(3, 1.0, 0), (2, 0.5, 1)]
    nothing = EvalReport.of([], 0.0).pass_rate
    assert (nothing.rate, nothing.low, nothing.high) == (0.0, 0.0, 1.0), "of no rollout, the widest interval"


def test_compare_gives_a_row_per_measure_and_one_for_all():
    before = EvalReport.of([rollout(str(i), i < 10, False) for i in range(40)], 1.0)
    after = EvalReport.of([rollout(str(i), True, i < 2) for i in range(40)], 1.0)
    rows = compare(before, after)
    assert [row.name for row in rows] == ["m0", "m1", "all measures"]
    assert rows[0].gain == pytest.approx(0.75)
    assert [row.clear for row in rows] == [True, False, False]


def test_the_first_transcript_failed_before_and_passes_now():
    before = [rollout("a", True), rollout("b", False), rollout("c", False), rollout("d", True)]
    after = [rollout("d", True), rollout("c", True), rollout("b", False), rollout("a", True), rollout("e", True)]
    picked = pick_transcripts(before, after)
    assert [(old.problem_id, new.problem_id) for old, new in picked] == [("c", "c"), ("b", "b"), ("a", "a")]
    same = [rollout("a", False), rollout("a", True), rollout("b", False)]
    assert [old.problem_id for old, _ in pick_transcripts(same, same)] == ["a", "b"]
    assert pick_transcripts([], []) == []


def test_a_score_without_a_verdict_has_a_mean_and_no_pass_rate():
    scored = replace(rollout("a", True), scores={"right": Score(1.0, True), "brief": Score(-0.5, None)})
    report = EvalReport.of([scored, scored], 0.0)
    assert report.pass_rate.rate == 1.0
    assert {m.name: (m.pass_rate.n, m.mean_value) for m in report.measures} == {"right": (2, 1.0), "brief": (0, -0.5)}
    assert [row.name for row in compare(report, report)] == ["right", "all measures"]
    report = EvalReport.of([replace(rollout("p", reward=0.5), scores={"reward": Score(0.5, False)})], 1.0)
    assert [change.name for change in compare_means(report, report)] == ["reward"], "one row, also by this name"


def test_the_row_of_all_measures_says_that_a_check_metric_is_not_in_it():
    scores = {"right": Score(1.0, True), "polite": Score(0.0, False, counts=False)}
    report = EvalReport.of([replace(rollout("p"), scores=scores)], 1.0)
    found = {row.name: row.after.value for row in compare(report, report)}
    assert found == {"right": 1.0, "polite": 0.0, "all rewarded measures": 1.0}
