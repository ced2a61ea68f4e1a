"""Findings: each appears where the metrics show it, and only there, with remedies that apply to the run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from palestra.core.config import RunConfig
from palestra.core.extras import has_settings
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.run_folder import RunFolder, RunKind
from palestra.core.types import Message, Rollout, Score, StopReason, ToolCall, ToolResult, Turn
from palestra.evals.evidence import Finding, RunFacts, recorded_examples
from palestra.evals.findings import (
    HELPS,
    TRAINING_RULES,
    broken_tool,
    evaluation_findings,
    outcome_findings,
    recorded_findings,
    run_findings,
)
from palestra.evals.rollout_stats import Example, find_examples, leaks_hint, loops, rollout_stats

GOOD = {
    "rollouts": 16.0, "rollout_failures": 0.0, "measure_errors": 0.0, "reward_mean": 0.5, "reward_min": 0.0,
    "reward_max": 1.0, "pass_rate": 0.5, "equal_reward_groups": 0.25, "passed_groups": 0.1, "failed_groups": 0.15,
    "groups": 4.0, "signal_groups": 3.0, "update_scale": 1.0, "completion_length_mean": 80.0,
    "conversation_length_max": 200.0, "truncation_rate": 0.0, "context_full_rate": 0.0, "looping_rate": 0.0,
    "tools_offered": 2.0, "tool_calls_mean": 1.0, "tool_error_rate": 0.2, "unknown_tool_rate": 0.1,
    "malformed_call_rate": 0.1, "rejected_format_rate": 0.0, "other_format_rate": 0.0, "invalid_argument_rate": 0.0,
    "raised_call_rate": 0.0, "repeated_call_rate": 0.1, "tool_limit_rate": 0.0,
    "unread_call_rate": 0.0, "unrun_call_rate": 0.0, "reinforced_rollouts": 6.0,
    "reinforced_without_tools": 1.0, "entropy": 0.5, "sampler_gap_mean": 0.008,
}  # fmt: skip
TIMES = {"sample_seconds": 8.0, "train_seconds": 2.0, "decode_seconds": 1.0}  # of a run that samples by its own engine
AGENT = RunFacts(RunConfig().with_step_size())
NO_SIGNAL = {"equal_reward_groups": 1.0, "signal_groups": 0.0, "update_scale": 0.0, "reinforced_rollouts": 0.0}
ZERO = NO_SIGNAL | {"reward_max": 0.0, "reward_mean": 0.0, "pass_rate": 0.0, "failed_groups": 1.0}
NO_CALLS = {"tool_calls_mean": 0.0, "tool_error_rate": 0.0, "unknown_tool_rate": 0.0, "malformed_call_rate": 0.0}
FAILING = {"tool_error_rate": 1.0, "unknown_tool_rate": 0.0, "malformed_call_rate": 0.0}


def with_settings(kind: RunKind = "agent", **settings: Any) -> RunFacts:
    config = RunConfig.build({name.replace("__", "."): value for name, value in settings.items()})
    return RunFacts(config.with_step_size(), kind)


def steps(count: int, **changes: float) -> list[dict[str, float]]:
    return [GOOD | changes for _ in range(count)]


def kinds(rows: list[dict[str, float]], **more: Any) -> list[str]:
    return [finding.kind for finding in run_findings(rows, **more)]


def test_a_run_that_learns_has_no_findings() -> None:
    assert run_findings(steps(10), facts=AGENT) == run_findings(steps(10), ended=True, facts=AGENT) == []
    assert "hint_leak" not in kinds(steps(10, hint_leak_rate=0.4), facts=AGENT), "it was there from the start"
    rows = [row for step in steps(6) for row in (step, {"step": 1.0, "eval/pass_rate": 0.5})]
    assert run_findings(rows, ended=True) == [], "rows of evaluations are passed over"
    assert evaluation_findings([rollout(1, 2, calls=(result("add"),))]) == []


# kind: the rows in which it appears, and rows much like them in which it must not
Changes = dict[str, float]
CASES: dict[str, tuple[Changes, list[Changes]]] = {
    "zero_reward": (
        ZERO,
        [ZERO | {"reward_max": 0.5}, ZERO | {"equal_reward_groups": 0.5}, ZERO | {"tokens_distilled": 900.0}],
    ),
    "equal_rewards": (NO_SIGNAL, [NO_SIGNAL | {"equal_reward_groups": 0.7, "update_scale": 0.9}, ZERO]),
    "solved": (
        NO_SIGNAL | {"reward_min": 1.0, "pass_rate": 1.0},
        [NO_SIGNAL | {"pass_rate": 0.9}, NO_SIGNAL | FAILING | {"reward_min": 1.0, "pass_rate": 1.0}],
    ),
    "reward_for_failed_calls": (
        NO_SIGNAL | FAILING | {"raised_call_rate": 1.0, "reward_min": 0.5, "reward_max": 0.5},
        [NO_SIGNAL | FAILING, NO_SIGNAL | {"reward_min": 0.5}, FAILING | {"reward_min": 0.5}],
    ),
    "mostly_equal_rewards": (
        {"equal_reward_groups": 0.8, "failed_groups": 0.8},
        [{"equal_reward_groups": 0.7}, {"equal_reward_groups": 0.8, "pass_rate": 0.95}],
    ),
    "low_signal": ({"equal_reward_groups": 0.9, "update_scale": 0.3}, [{"update_scale": 0.6}, {"update_scale": 0.0}]),
    "no_tool_calls": (
        NO_CALLS,
        [NO_CALLS | {"tools_offered": 0.0}, NO_CALLS | {"unread_call_rate": 0.1}, NO_CALLS | {"unrun_call_rate": 0.1}],
    ),
    "unread_calls": (NO_CALLS | {"unread_call_rate": 0.9}, [NO_CALLS, {"unread_call_rate": 0.1}]),
    "unrun_calls": (NO_CALLS | {"unrun_call_rate": 0.9}, [NO_CALLS, {"unrun_call_rate": 0.9}]),
    "rejected_format": (
        FAILING | {"rejected_format_rate": 0.8, "other_format_rate": 0.8, "raised_call_rate": 0.2},
        [{"other_format_rate": 1.0, "tool_error_rate": 0.0}, FAILING | {"malformed_call_rate": 1.0}],
    ),
    "malformed_calls": (FAILING | {"malformed_call_rate": 1.0}, [{"malformed_call_rate": 0.5, "tool_error_rate": 0.5}]),
    "unknown_tools": (FAILING | {"unknown_tool_rate": 1.0}, [FAILING | {"malformed_call_rate": 1.0}]),
    "invalid_arguments": (FAILING | {"invalid_argument_rate": 1.0}, [FAILING | {"raised_call_rate": 1.0}]),
    "tool_errors": (
        FAILING | {"raised_call_rate": 1.0},
        [FAILING | {"unknown_tool_rate": 1.0}, FAILING | {"raised_call_rate": 1.0, "pass_rate": 0.95}],
    ),
    "truncated": (
        {"truncation_rate": 0.8},
        [{"truncation_rate": 0.2}, {"truncation_rate": 0.8, "context_full_rate": 0.7}],
    ),
    "context_full": ({"truncation_rate": 0.8, "context_full_rate": 0.7}, [{"truncation_rate": 0.8}]),
    "repeated_calls": (
        {"tool_limit_rate": 0.8, "repeated_call_rate": 0.6},
        [{"tool_limit_rate": 0.8}, {"repeated_call_rate": 0.6}],
    ),
    "tool_limit": (
        {"tool_limit_rate": 0.8},
        [
            {"tool_limit_rate": 0.3},
            {"tool_limit_rate": 0.8, "pass_rate": 0.95},
            {"tool_limit_rate": 0.8, "repeated_call_rate": 0.6},
        ],
    ),
    "looping": ({"truncation_rate": 0.8, "looping_rate": 0.6}, [{"truncation_rate": 0.8, "looping_rate": 0.1}]),
    "rollout_failures": ({"rollout_failures": 8.0}, [{"rollout_failures": 1.0}]),
    "length_preference": (
        {"judge/length_correlation/ruler": 0.7, "judge/length_groups/ruler": 4.0},
        [
            {"judge/length_correlation/ruler": 0.3, "judge/length_groups/ruler": 4.0},
            {"judge/length_correlation/ruler": 0.9, "judge/length_groups/ruler": 1.0},
        ],
    ),
    "measure_errors": ({"measure_errors/judge": 1.0}, [{"measure_errors": 0.0}]),
    "hung_calls": ({"hung_calls": 7.0}, [{"hung_calls": 0.0}]),
    "stale_groups": ({"stale_groups_dropped": 3.0}, [{"stale_groups_dropped": 1.0, "groups": 8.0}]),
    "staleness": (
        {"staleness_max": 6.0},
        [{"staleness_max": 2.0, "clip_fraction_high": 0.1}, {"clip_fraction_high": 0.3}],  # of several iterations
    ),
    "weak_teacher": (
        {"teacher_gain": -0.2, "distill_divergence": 0.5},
        [{"teacher_gain": 0.1, "distill_divergence": 0.5}, {"teacher_gain": -0.01, "distill_divergence": 0.5}],
    ),
    "idle": (
        TIMES | {"agent_loop_seconds": 7.0},
        [TIMES | {"agent_loop_seconds": 4.0}, {"sample_seconds": 8.0, "train_seconds": 2.0, "agent_loop_seconds": 7.9}],
    ),
}
LATER: dict[str, tuple[Changes, list[Changes]]] = {  # of the last five steps of ten
    "lucky_guesses": (
        {"tool_calls_mean": 0.07, "reinforced_without_tools": 6.0},
        [
            {"tool_calls_mean": 0.07},
            {"tool_calls_mean": 0.9, "reinforced_without_tools": 6.0},
            {"tool_calls_mean": 0.07, "reinforced_without_tools": 6.0, "pass_rate": 0.7},
        ],
    ),
    "tool_collapse": ({"tool_calls_mean": 0.1}, [{"tool_calls_mean": 0.3}, {"tool_calls_mean": 0.1, "pass_rate": 0.8}]),
    "short_answers": (
        {"completion_length_mean": 8.0},
        [{"completion_length_mean": 8.0, "pass_rate": 0.8}, {"completion_length_mean": 8.0, "reward_mean": 0.6}],
    ),
    "sampler_gap": (
        {"sampler_gap_mean": 0.03},
        [
            {"sampler_gap_mean": 0.02},
            {"sampler_gap_mean": 0.009, "entropy": 0.06},
            {"sampler_gap_mean": 0.03, "staleness_max": 1.0},
        ],
    ),
    "hint_leak": ({"hint_leak_rate": 0.3}, [{"hint_leak_rate": 0.05}, {"hint_leak_rate": 0.0}]),
    "entropy_collapse": ({"entropy": 0.05}, [{"entropy": 0.05, "pass_rate": 0.8}, {"entropy": 0.2}]),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_finding_appears_where_the_metrics_show_it(kind: str) -> None:
    found = {finding.kind: finding for finding in run_findings(steps(6, **CASES[kind][0]), facts=AGENT)}
    assert kind in found
    assert set(found) <= {kind, "tool_errors"}, "and no other, unless it is true as well"
    assert set(found[kind].settings) <= set(RunConfig.keys())
    assert all(name in found[kind].sentence for name in found[kind].settings), "settings are named in the sentence"


@pytest.mark.parametrize(("kind", "changes"), [(kind, rows) for kind, (_, no) in CASES.items() for rows in no])
def test_a_finding_is_absent_where_the_metrics_do_not_show_it(kind: str, changes: Changes) -> None:
    assert kind not in kinds(steps(6, **changes), facts=AGENT)
    assert kind not in kinds(steps(6, **changes), facts=AGENT, ended=True)


@pytest.mark.parametrize("kind", LATER)
def test_a_change_for_the_worse_is_noticed(kind: str) -> None:
    rows = [*steps(5), *steps(5, **LATER[kind][0])]
    assert kinds(rows, facts=AGENT) == kinds(rows, facts=AGENT, ended=True) == [kind]


@pytest.mark.parametrize(("kind", "last"), [(kind, rows) for kind, (_, no) in LATER.items() for rows in no])
def test_a_change_that_paid_off_or_is_small_is_no_finding(kind: str, last: Changes) -> None:
    assert kind not in kinds([*steps(5), *steps(5, **last)], facts=AGENT)


def test_a_sampler_that_agreed_exactly_at_first_and_differs_later_is_a_finding() -> None:
    assert kinds([*steps(1, sampler_gap_mean=0.0), *steps(5, sampler_gap_mean=0.03)], facts=AGENT) == ["sampler_gap"]


def test_every_kind_of_finding_has_a_case_in_which_it_appears_and_one_in_which_it_does_not() -> None:
    rules = [rule for row in TRAINING_RULES for rule in row]
    assert {rule.kind for rule in rules} == set(CASES) | set(LATER)
    assert set(HELPS) <= {remedy for rule in rules for remedy in rule.remedies}, "of a remedy that some finding has"
    assert all(no for _, no in (*CASES.values(), *LATER.values()))


def test_a_run_in_progress_is_judged_by_its_newest_steps_from_the_third_on_and_an_ended_one_as_a_whole() -> None:
    idle = steps(2, **NO_SIGNAL)
    assert kinds(idle) == []
    assert kinds(idle, ended=True) == ["equal_rewards"]
    assert kinds(steps(3, **NO_SIGNAL)) == ["equal_rewards"]
    assert kinds([*steps(9, **NO_SIGNAL), *steps(2)]) == []
    (finding,) = run_findings([*steps(5, **NO_SIGNAL), *steps(5)], ended=True)
    assert "in 5 of 10 steps" in finding.sentence
    assert kinds([*steps(4, **NO_SIGNAL), *steps(6)], ended=True) == []


# What findings say.


def only(rows: list[dict[str, float]], facts: RunFacts = AGENT, **more: Any) -> Finding:
    (finding,) = run_findings(rows, facts=facts, **more)
    return finding


def test_lucky_guesses_are_told_with_numbers() -> None:
    """Calls fall from 3.5 to 0.07 while single guesses are all that is rewarded."""
    few = {"pass_rate": 0.003, "equal_reward_groups": 0.97, "reinforced_rollouts": 1.0, "reinforced_without_tools": 1.0}
    rows = [*steps(10, tool_calls_mean=3.5, **few), *steps(10, tool_calls_mean=0.07, **few)]
    found = {finding.kind: finding.sentence for finding in run_findings(rows, facts=AGENT)}
    assert set(found) == {"mostly_equal_rewards", "lucky_guesses"}
    assert "from 3.5 to 0.07 per rollout, while the pass rate went from 0.3% to 0.3%" in found["lucky_guesses"]
    assert "20 of the 20 rollouts that earned more than others" in found["lucky_guesses"]


def test_calls_that_vanished_without_any_reward_are_not_blamed_on_the_reward() -> None:
    rows = [*steps(5, **ZERO), *steps(5, **ZERO, **NO_CALLS)]
    found = {finding.kind: finding.sentence for finding in run_findings(rows, facts=AGENT)}
    assert set(found) == {"zero_reward", "tool_collapse"}
    assert "reward" not in found["tool_collapse"]


def test_reward_counts_as_a_gain_where_nothing_decides_about_passing() -> None:
    graded = [{k: v for k, v in row.items() if k != "pass_rate"} for row in steps(10)]
    for row in graded[5:]:
        row |= {"tool_calls_mean": 0.1}
    assert kinds(graded, facts=AGENT) == ["tool_collapse"]
    for row in graded[5:]:
        row |= {"reward_mean": 0.9}
    assert kinds(graded, facts=AGENT) == []


# Remedies: only where they apply.

FEW = CASES["mostly_equal_rewards"][0]
NO_CONSTRAINTS = [
    with_settings(rollout__constrain_tool_calls=True),
    with_settings("wire"),
    with_settings("program"),
    with_settings(backend="tinker"),
    *([with_settings(vllm__mode="server")] if has_settings("vllm") else []),
    RunFacts(),
]
NOT_AHEAD = [
    *(with_settings(kind) for kind in ("wire", "function", "prompts")),
    replace(AGENT, ranks=2),
    with_settings(rollout__max_staleness=1),
    with_settings(model__sleep_mode=True),
]
NO_REDRAWS = [with_settings("wire"), with_settings("prompts"), with_settings(train__signal_share=1.0)]
NOT_WARMER = [with_settings(rollout__temperature=1.0), with_settings("wire"), with_settings(backend="tinker")]
NO_WARM_START = [
    *(with_settings(kind) for kind in ("wire", "function", "program", "prompts")),
    *(with_settings(stages__plan=plan) for plan in ("auto", "rft,grpo")),
    *(with_settings(backend=backend) for backend in ("tinker", "ray")),
    with_settings(rollout__max_staleness=1),
    replace(AGENT, ranks=2),
]
# setting, metrics, facts with which the setting is advised, and others with which it is not
ADVICE: list[tuple[str, Changes, list[RunFacts], list[RunFacts]]] = [
    *(
        ("rollout.constrain_tool_calls", CASES[kind][0], [AGENT], NO_CONSTRAINTS)
        for kind in ("malformed_calls", "unknown_tools", "invalid_arguments")
    ),
    ("rollout.max_staleness", TIMES | {"agent_loop_seconds": 7.0}, [AGENT], NOT_AHEAD),
    ("rollout.group_size", FEW, [AGENT], []),
    ("rollout.group_size", FEW | {"pass_rate": 0.0}, [], [AGENT]),
    ("train.signal_share", FEW, [AGENT], NO_REDRAWS),
    ("train.signal_share", ZERO, [], [AGENT]),
    ("rollout.temperature", NO_SIGNAL, [AGENT], NOT_WARMER),
    ("stages.plan", ZERO, [AGENT], NO_WARM_START),
    ("stages.plan", NO_SIGNAL | {"pass_rate": 0.0}, [AGENT], NO_WARM_START),
    ("stages.plan", NO_SIGNAL, [], [AGENT]),
    ("stages.plan", NO_SIGNAL | {"pass_rate": 1.0}, [], [AGENT]),
    ("rollout.max_tool_rounds", CASES["unrun_calls"][0], [with_settings(rollout__max_tool_rounds=0)], [AGENT]),
]


@pytest.mark.parametrize(("setting", "metrics", "advised", "not_advised"), ADVICE)
def test_a_setting_is_advised_only_where_it_helps(
    setting: str, metrics: Changes, advised: list[RunFacts], not_advised: list[RunFacts]
) -> None:
    found = [setting in only(steps(6, **metrics), facts).settings for facts in (*advised, *not_advised)]
    assert found == [True] * len(advised) + [False] * len(not_advised)


def test_a_warm_start_is_advised_by_its_option_where_nothing_has_passed_from_the_first_steps() -> None:
    assert "--warm-start auto" in only(steps(6, **ZERO)).sentence
    lost = only([*steps(4), *steps(6, **ZERO)], ended=True)
    assert lost.kind == "zero_reward", "what once passed was lost on the way"
    unknown = [{k: v for k, v in row.items() if k != "pass_rate"} for row in steps(6, **ZERO)]
    for finding in (lost, only(unknown)):
        assert "stages.plan" not in finding.settings, finding


CUT_OFF = {"truncation_rate": 0.8}
LOOPS = {"truncation_rate": 0.8, "looping_rate": 0.7}
EASY = {"equal_reward_groups": 0.8, "passed_groups": 0.7, "failed_groups": 0.1, "pass_rate": 0.8}
WEAK = {"teacher_gain": -0.2, "distill_divergence": 0.5}
LEAKS = {"hint_leak_rate": 0.3}
UNFIT = FAILING | {"malformed_call_rate": 0.6, "invalid_argument_rate": 0.4}
DISTILL = ("distill.context", "distill.coefficient")
OF_DISTILL = (
    []
    if not has_settings("distill")
    else [
        (WEAK, True, with_settings(distill__teacher="big"), "big", ("distill.teacher", "distill.coefficient")),
        (LEAKS, False, with_settings(distill__context=["sibling"]), "hint", ("distill.coefficient",)),
    ]
)
# metrics of the last five of ten steps, or of all; facts; words of the finding; its settings
SAID: list[tuple[Changes, bool, RunFacts, str, tuple[str, ...]]] = [
    (UNFIT, True, AGENT, "of the tool calls in the last 5 steps failed: 60% could not be parsed, 40% had arguments",
     ("rollout.constrain_tool_calls",)),
    (CASES["low_signal"][0], True, AGENT, "scaled down to 30% of the learning rate",
     ("rollout.group_size", "train.signal_share")),
    (EASY, True, AGENT, "harder", ()),
    *((CUT_OFF, True, replace(AGENT, context_tokens=size), "rollout.max_new_tokens=1024", settings)
      for size, settings in ((None, ("rollout.max_new_tokens",)), (4000, ("rollout.max_new_tokens",)), (205, ()))),
    (CUT_OFF, True, with_settings("wire"), "the environment's own limit", ()),
    (CASES["idle"][0], True, with_settings("wire"), "waiting for environments to post", ()),
    ({"staleness_max": 6.0}, True, with_settings("wire"), "rollout.max_staleness=2",
     ("rollout.max_staleness", "train.learning_rate")),
    ({"staleness_max": 6.0}, True, with_settings(rollout__max_staleness=8), "(now 8)",
     ("rollout.max_staleness", "train.learning_rate")),
    ({"staleness_max": 6.0}, True, with_settings("function"), "6.0 versions", ("train.learning_rate",)),
    (LOOPS, False, AGENT, "up from 0% in the first steps", ("train.learning_rate", "rollout.max_new_tokens")),
    (LOOPS, True, AGENT, "repeated themselves;", ("rollout.max_new_tokens",)),
    (WEAK, True, AGENT, "the model with a hint", ("distill.teacher", *DISTILL)),
    (LEAKS, False, AGENT, "distill.context=sibling,feedback", DISTILL),
    *OF_DISTILL,
]  # fmt: skip


@pytest.mark.parametrize(("metrics", "always", "facts", "words", "settings"), SAID)
def test_a_finding_says_what_is_known_and_advises_what_helps(
    metrics: Changes, always: bool, facts: RunFacts, words: str, settings: tuple[str, ...]
) -> None:
    finding = only(steps(10, **metrics) if always else [*steps(5), *steps(5, **metrics)], facts)
    assert words in finding.sentence
    assert finding.settings == settings


def test_a_run_whose_settings_are_not_known_gets_no_settings() -> None:
    every = [finding for rows, _ in CASES.values() for finding in run_findings(steps(6, **rows))]
    assert len(every) >= len(CASES)
    assert all(finding.settings == () for finding in every)


def test_an_early_end_names_its_setting_only_if_that_was_the_reason() -> None:
    solved = outcome_findings([], ended_early="every rollout passed (train.stop_when_solved=3)")
    assert [finding.settings for finding in solved] == [("train.stop_when_solved",)]
    (other,) = outcome_findings([], ended_early="the reward collapsed")
    assert (other.kind, other.settings) == ("ended_early", ())
    assert outcome_findings([]) == []


# Examples, and findings on disk.


def test_a_finding_has_an_example_of_what_it_says() -> None:
    call = '```json {"name": "add", "arguments": {}}```'
    said = rollout(1, messages=(Message("user", "?"), Message("assistant", call)))
    (finding,) = evaluation_findings([rollout(1), said], AGENT, "after")
    assert finding.kind == "unread_calls"
    assert finding.example == Example("after", 0, 1, "p", call)
    assert str(finding).endswith(f"Example (evals/after.jsonl, line 2): {call}")
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding
    assert Finding.from_dict({"sentence": "It loops."}) == Finding("", "It loops."), "of an older report"


@pytest.mark.parametrize(
    ("trait", "text", "shown"),
    [
        ("failure", "boom", {"error": "boom"}),
        ("measure_error", "judge: away", {"scores": {"judge": Score(0.0, False, "away", error=True)}}),
        ("raised", "add() → Error: add raised KeyError", {"calls": ("Error: add raised KeyError",)}),
        ("truncated", "so far", {"stop": "truncated"}),
        ("context_full", "so far", {"stop": "context_full"}),
        ("guess", "so far", {"reward": 1.0}),
        ("hint", "As the hint says: 5", {"messages": (Message("assistant", "As the hint says: 5"),)}),
    ],
)
def test_examples_are_found_by_trait(trait: str, text: str, shown: dict[str, Any]) -> None:
    calls = tuple(result("add", content, ok=False) for content in shown.pop("calls", ()))
    said = (Message("user", "?"), Message("assistant", "so far"))
    with_trait = rollout(1, calls=calls, **{"messages": said} | shown)
    found = find_examples([rollout(1, calls=(result("add"),)), with_trait], "train", 7)
    assert (found[trait].step, found[trait].index, found[trait].text) == (7, 1, text)
    assert trait not in find_examples([rollout(1, calls=(result("add"),))])


def test_a_run_on_disk_is_judged_by_its_report_or_else_by_its_metrics(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", RunConfig(), {"kind": "agent"})
    folder.metrics_file.write_text("".join(json.dumps({"step": i, **GOOD, **ZERO}) + "\n" for i in range(4)))
    (finding,) = recorded_findings(folder, ended=False)
    assert "in the last 4 steps" in finding.sentence
    folder.report_file.write_text(json.dumps({"agent": "of Palestra 0.1"}))
    assert "in 4 of 4 steps" in str(recorded_findings(folder, ended=True)[0])
    folder.report_file.write_text(json.dumps({"findings": [{"kind": "looping", "sentence": "It loops."}]}))
    assert recorded_findings(folder, ended=True) == [Finding("looping", "It loops.")]
    assert recorded_findings(folder, ended=False) == [finding], "a resumed run has the report of its first part"


def test_the_newest_rollouts_on_disk_are_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "run", RunConfig(), {})
    assert recorded_examples(folder) == {}
    rows = [{"step": step, **rollout_to_dict(rollout(1))} for step in (1, 1, 2, 2)]
    folder.rollouts_file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 3}]))
    assert (recorded_examples(folder)["no_call"].step, recorded_examples(folder)["no_call"].index) == (2, 0)
    whole = folder.rollouts_file.stat().st_size
    monkeypatch.setattr("palestra.evals.evidence._TAIL_BYTES", whole - 10)
    assert recorded_examples(folder)["no_call"].step == 2, "step 1 is not whole in the tail"
    monkeypatch.setattr("palestra.evals.evidence._TAIL_BYTES", 100)
    assert recorded_examples(folder) == {}


def test_how_calls_failed_and_in_which_format_survives_the_disk() -> None:
    wrong = ToolResult(ToolCall("c", "add", error="write <tool_call>", format="json"), "Error", ok=False)
    kept = rollout_from_dict(json.loads(json.dumps(rollout_to_dict(rollout(1, calls=(wrong, result("add")))))))
    assert rollout_stats([kept])["rejected_format_rate"] == 0.5
    assert rollout_stats([kept])["other_format_rate"] == 0.5


# What the rollouts themselves tell.


def rollout(*ids: int, stop: StopReason = "answered", calls: tuple[ToolResult, ...] = (), **more: Any) -> Rollout:
    turns = (Turn("template", (1,)), Turn("model", ids, [-0.1] * len(ids)))  # type: ignore[arg-type]
    more = {"messages": (), **more}
    return Rollout("p", turns, stop=stop, tool_results=calls, tool_names=("add", "search"), **more)


def result(name: str, content: str = "2", ok: bool = True) -> ToolResult:
    return ToolResult(ToolCall("c", name), content, ok, raised=" raised " in content)


QUESTION = Message("user", "What is 2 + 3?")


@pytest.mark.parametrize(
    ("text", "expect", "calls", "expected"),
    [
        ("It is 5.", "5", (), True),
        ("It is 5.", 5, (result("add", "2"),), True),
        ("It is 5.", "5", (result("add", "5"),), False),
        ("It is 5.", "5", (result("add", "the sum is 5"),), False),
        ("It is 6.", "5", (), False),
        ("It is 15 or 5.5.", "5", (), False),
        ("It is 3.", "3", (), False),  # the question has it
        ("As the hint says, it is 6.", "5", (result("add", "6"),), True),
        ("The expected answer is 6.", None, (result("add", "6"),), True),
        ("I expected an answer.", None, (), False),
        ("It is True.", True, (), False),
        ("", "5", (), False),
    ],
)
def test_a_leaked_hint_is_one_that_nothing_but_a_hint_explains(
    text: str, expect: Any, calls: tuple[ToolResult, ...], expected: bool
) -> None:
    said = rollout(1, messages=(QUESTION, Message("assistant", text)), calls=calls)
    assert leaks_hint(said, expect) is expected
    without_tools = replace(said, tool_names=(), tool_results=())
    assert leaks_hint(without_tools, expect) is bool(re.search("the hint|expected answer is", text, re.IGNORECASE))


def test_stats_count_repeated_calls_and_rollouts_that_end_at_the_limit_of_rounds() -> None:
    asks = Message("assistant", "", (ToolCall("c", "add", {"a": 1}),))
    other = Message("assistant", "", (ToolCall("c", "add", {"a": 2}),))
    stats = rollout_stats([rollout(1, stop="tool_limit", messages=(asks,)), rollout(1, messages=(other,))])
    assert (stats["repeated_call_rate"], stats["tool_limit_rate"]) == (0.0, 0.5)
    turns = (Turn("model", (1,), [-0.1]),) * 4  # type: ignore[arg-type]
    again = replace(rollout(1, messages=(asks, asks, other, asks)), turns=turns)
    assert rollout_stats([again])["repeated_call_rate"] == 0.5


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
