"""Reward functions in all of TRL's forms, reward models, and what happens when they fail."""

import asyncio
import json
import logging
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from palestra.core.errors import UserCodeError
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Group, Message, Problem, Rollout, Score, Turn
from palestra.evals.report import EvalReport
from palestra.evals.rollout_stats import rollout_stats
from palestra.rollout.rewards import RewardFunctions, TrainerState

PROBLEM = Problem("p", "What is 2 + 3?", "5", {"difficulty": 2, "completions": "a column of that name"})


def attempt(text: str, *, scores: dict[str, Score] | None = None, tokens: int = 3, error: str | None = None) -> Rollout:
    turns = (Turn("template", (1, 2)), Turn("model", [i % 60 for i in range(tokens)], [-1.0] * tokens))
    messages = (Message("user", "What is 2 + 3?"), Message("assistant", text))
    return Rollout("p", turns, messages, "answered", scores=scores or {}, error=error)


def reward(functions: RewardFunctions, *rollouts: Rollout, **weights: float) -> Group:
    episodes: Any = [SimpleNamespace(environment=i) for i in range(len(rollouts))]
    return asyncio.run(functions.reward(PROBLEM, rollouts, episodes, weights))


PAIR = (attempt("It is 5."), attempt("It is 6, or so."))


def rewards(*functions: Any, rollouts: Any = PAIR) -> list[float]:
    return reward(RewardFunctions(functions), *rollouts).rewards


async def slow(completions: list, **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return [1.0, 2.0]


class Callable_:
    async def __call__(self, completions: list, **columns: Any) -> list[float]:
        return [1.0, 2.0]


class RewardModel:
    def calculate_combined_reward(self, output: str, expected_answer: Any) -> float:
        return 2.5 if expected_answer in output else -1.0


@pytest.mark.parametrize("function", [slow, Callable_()], ids=["function", "object"])
def test_async_reward_functions_are_awaited(function):
    assert rewards(function) == [1.0, 2.0]


def test_functions_get_what_trl_gives_them():
    seen: dict[str, Any] = {}

    def rate(**arguments: Any) -> list[float]:
        seen.update(arguments)
        return [0.0, 0.0]

    functions = RewardFunctions([rate], state=lambda: TrainerState(3, 10, 0.5))
    reward(functions, attempt("a", tokens=2), attempt("b", tokens=4))
    assert seen["completion_ids"] == [[0, 1], [0, 1, 2, 3]]
    assert (seen["trainer_state"].global_step, seen["trainer_state"].max_steps) == (3, 10)
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]]
    assert (seen["difficulty"], seen["environments"]) == ([2, 2], [0, 1])


def test_a_function_gets_only_what_it_has_parameters_for_and_a_reward_model_its_own_two():
    assert rewards(lambda completions, difficulty: [float(d) for d in difficulty]) == [2.0, 2.0]
    assert rewards(RewardModel()) == [2.5, -1.0]
    with pytest.raises(UserCodeError, match="'brevity' is not a reward function"):
        RewardFunctions(["brevity"])  # type: ignore[list-item]


def test_trls_own_functions_run():
    trl = pytest.importorskip("trl.rewards")
    long, short = attempt("x " * 50, tokens=95), attempt("one two", tokens=10)
    punished = rewards(trl.get_soft_overlong_punishment(100, 20), rollouts=(long, short))
    assert punished == pytest.approx([-0.75, 0.0])
    repeated = rewards(trl.get_repetition_penalty_reward(2, -1.0), rollouts=(long, short))
    assert repeated[0] < repeated[1] == 0.0


def test_none_is_no_verdict_and_a_rollout_without_any_is_left_out():
    def sums(completions: list) -> list[Any]:
        return [2.0, None, None]

    def words(completions: list) -> list[Any]:
        return [1.0, 1.0, None]

    rollouts = (attempt("a"), attempt("b"), attempt("c"))
    first, second, third = reward(RewardFunctions([sums, words]), *rollouts).rollouts
    assert (first.reward, second.reward) == (3.0, 1.0)
    assert list(second.scores) == ["words"]
    assert third.error == "no measure and no reward function scored it"


def test_what_a_function_logs_is_in_the_groups_metrics_and_in_the_reasons():
    def rate(completions: list, log_metric: Any, log_extra: Any) -> list[float]:
        for value in (0.0, 1.0):
            log_metric("accuracy", value)
        log_extra("found", ["five", "six"])
        return [1.0, 0.0]

    group = reward(RewardFunctions([rate]), attempt("a"), attempt("b"))
    assert group.metrics == {"accuracy": 0.5}
    assert [r.scores["rate"].reason for r in group.rollouts] == ["found: five", "found: six"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], "it gave 1 values for 2 completions"),
        (["good", 1.0], "raised ValueError"),
        (None, "raised TypeError"),
        ([float("nan"), 1.0], "it gave nan; return finite numbers"),
    ],
)
def test_a_function_that_fails_is_left_out_for_that_group_and_warned_about_once(values, words, caplog):
    def rate(completions: list) -> Any:
        return values

    right = {"right": Score(1.0, True)}
    functions = RewardFunctions([rate, lambda completions: [1.0, 2.0]], measures=["right"])
    with caplog.at_level(logging.WARNING, "palestra"):
        for _ in range(2):
            group = reward(functions, attempt("a", scores=right), attempt("b", scores=right), right=0.5)
    assert group.rewards == [1.5, 2.5]
    assert group.rollouts[0].scores["rate"].error
    assert words in group.rollouts[0].scores["rate"].reason
    assert len([r for r in caplog.records if "rate" in r.getMessage()]) == 1


def test_when_the_only_reward_fails_its_group_fails_and_rollouts_that_failed_are_not_shown_to_it():
    def rate(completions: list) -> Any:
        if len(completions) > 1:
            raise RuntimeError("no such column")
        return [float(len(c)) for c in completions]

    group = reward(RewardFunctions([rate]), attempt("a"), attempt("b"))
    assert {r.error for r in group.rollouts} == {"reward function rate raised RuntimeError: no such column"}
    group = reward(RewardFunctions([rate]), attempt("", error="no tool server"), attempt("b"))
    assert group.rewards == [0.0, 1.0]
    assert group.rollouts[0].error == "no tool server"


def test_beside_measures_a_function_has_no_say_in_what_passes():
    passes = attempt("It is 5.", scores={"right": Score(1.0, True)})
    group = reward(RewardFunctions([lambda completions: [-1.0]]), passes)
    assert group.rollouts[0].passed
    alone = reward(RewardFunctions([lambda completions: [1.0, 0.5]]), attempt("a"), attempt("b"))
    assert [r.passed for r in alone.rollouts] == [True, False], "alone, a full reward passes"


def test_functions_have_names_of_their_own():
    @dataclass
    class right:
        value: float

        def __call__(self, completions: list) -> list[float]:
            return [self.value] * len(completions)

    rollout = attempt("a", scores={"right": Score(1.0, True)})
    group = reward(RewardFunctions([right(1.0), right(2.0)], measures=["right"]), rollout, right=0.5)
    values = {name: score.value for name, score in group.rollouts[0].scores.items()}
    assert values == {"right": 1.0, "right_2": 1.0, "right_3": 2.0}
    assert group.rewards == [3.5]
    assert replace(group.rollouts[0], scores={}).passed is False


def test_a_witness_of_weight_0_changes_neither_the_reward_nor_what_passes():
    good, bad = Score(1.0, True), Score(0.0, False)
    failed = Score(0.0, False, "the judge is away", error=True)
    rollouts = [attempt("5", scores={"right": good, "witness": verdict}) for verdict in (good, bad, failed)]
    group = reward(RewardFunctions(), *rollouts, right=1.0, witness=0.0)
    assert [(r.reward, r.passed, r.error) for r in group.rollouts] == [(1.0, True, None)] * 3
    report, stats = EvalReport.of(group.rollouts, 1.0), rollout_stats(group.rollouts)
    assert (report.pass_rate.passed, report.pass_rate.n) == (3, 3)
    passed = {m.name: (m.pass_rate.passed, m.pass_rate.n) for m in report.measures}
    assert passed == {"right": (3, 3), "witness": (1, 2)}
    assert (stats["pass_rate"], stats["pass_rate/witness"], stats["measure_errors"]) == (1.0, 0.5, 1.0)


def test_what_counts_is_in_the_record_and_records_without_it_count_all():
    group = reward(
        RewardFunctions(), attempt("5", scores={"right": Score(1.0, True), "seen": Score(0.0, False)}), seen=0.0
    )
    record = json.loads(json.dumps(rollout_to_dict(group.rollouts[0])))
    assert record["passed"] is True
    assert "counts" not in record["scores"]["right"]
    assert rollout_from_dict(record).passed
    del record["scores"]["seen"]["counts"]
    assert not rollout_from_dict(record).passed
