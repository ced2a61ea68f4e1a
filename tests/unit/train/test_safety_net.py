"""Collapse is noticed and undone: pure judgements, the loop with fakes, and runs of the embedded model."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_fakes import Loop, attempt, make_loop

from palestra import demo, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import NotFiniteError
from palestra.core.run_folder import RunFolder
from palestra.evals.report import EvalReport
from palestra.learner.local import LocalLearner
from palestra.models.loading import load_model
from palestra.train.checkpoint import TrainState, read_checkpoint, step_folder
from palestra.train.run import Run
from palestra.train.safety_net import WINDOW, Health, SafetyState, Snapshots, collapse_reason
from palestra.train.setup import with_adapter

HEALTHY = {
    "reward_mean": 0.05, "reward_std": 0.2, "groups": 16.0, "pass_rate": 0.05, "entropy": 0.5, "truncation_rate": 0.1,
    "looping_rate": 0.0, "completion_length_mean": 100.0, "tool_calls_mean": 3.0,
}  # fmt: skip
GOOD = {"reward_mean": 0.8, "pass_rate": 0.8, "reward_std": 0.4}


def health_of(*windows: dict[str, float]) -> Health:
    """A window of steps for each of these changes to the healthy row."""
    health = Health()
    for changes in windows:
        for _ in range(WINDOW):
            health = health.with_step(HEALTHY | changes)
    return health


@pytest.mark.parametrize(
    ("now", "word"),
    [
        ({"truncation_rate": 0.9, "looping_rate": 0.8}, "cut off"),
        ({"completion_length_mean": 16.0}, "shrank"),
        ({"tool_calls_mean": 0.07}, "tool calls"),
        ({"entropy": 6.0}, "entropy"),
        ({"entropy": 0.001}, "entropy"),
    ],
)
def test_a_change_of_behaviour_without_a_gain_is_a_collapse(now: dict[str, float], word: str) -> None:
    assert word in (collapse_reason(health_of({}, now)) or "")
    assert collapse_reason(health_of({}, now | GOOD)) is None


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {}),
        ({}, {"tool_calls_mean": 1.0}),
        ({}, {"completion_length_mean": 50.0}),
        ({}, {"entropy": 0.1}),
        (GOOD, GOOD | {"completion_length_mean": 10.0, "tool_calls_mean": 0.0}),  # as good in fewer words
    ],
)
def test_small_changes_and_fewer_words_for_the_same_reward_are_no_collapse(before, now) -> None:
    assert collapse_reason(health_of(before, now)) is None


@pytest.mark.parametrize(("reward", "groups", "is_collapse"), [(0.1, 16, True), (0.7, 16, False), (0.45, 1, False)])
def test_a_fall_of_the_reward_counts_if_it_is_large_and_no_accident(reward, groups, is_collapse) -> None:
    fallen = GOOD | {"reward_mean": reward, "groups": groups}
    reason = collapse_reason(health_of({}, GOOD | {"groups": groups}, fallen))
    assert ("fell from 0.8 to 0.1" in (reason or "")) == is_collapse


def test_nothing_is_judged_before_two_windows_and_a_step_without_rollouts_counts_for_nothing() -> None:
    health = health_of(GOOD)
    assert health.with_step({"rollouts": 4.0}) == health
    assert collapse_reason(health) is None
    _, after = SafetyState(health_of({}, {"entropy": 9.0})).rolled_back(8, "reason", 2, has_best=True)
    assert collapse_reason(after.health) is None


def test_the_safety_state_survives_json() -> None:
    state = TrainState(safety=SafetyState(health_of({}, GOOD), 7, 0.8, 7, 1, 0.3, ("step 9: it fell",)))
    assert TrainState.from_dict(json.loads(json.dumps(asdict(state)))) == state


def test_the_second_collapse_from_the_same_weights_goes_back_to_the_beginning() -> None:
    ended, first = SafetyState(best_step=8).rolled_back(12, "reason", 2, has_best=True)
    assert (ended, first.restored_step, first.rollbacks, first.rate_factor) == (None, 8, 1, 0.3)
    ended, second = first.rolled_back(18, "reason", 2, has_best=True)
    assert (ended, second.restored_step, second.rollbacks) == (None, 0, 2)
    ended, third = replace(second, best_step=20).rolled_back(25, "reason", 2, has_best=True)
    assert ended == third.events[-1]
    assert third.restored_step == 20


def guarded(loop: Loop) -> Loop:
    loop.training.snapshots = Snapshots(loop.learner)  # type: ignore[arg-type]
    return loop


def falls_after(step: int) -> Any:
    """Rewards of 1 and 0.9 up to this step, then 0.1 and 0, of two groups a step."""
    return lambda number, problem: [attempt(problem, r) for r in ((0.9, 1.0) if number < 2 * step else (0.0, 0.1))]


def test_a_collapse_restores_the_best_weights_and_lowers_the_learning_rate() -> None:
    loop = guarded(make_loop(steps=8, play=falls_after(6)))
    loop.training.run()
    safety = loop.training.state.safety
    assert safety.events[0].startswith("step 8: the mean reward fell from 0.95 to 0.5; the run went back")
    assert (safety.rollbacks, safety.rate_factor) == (1, 0.3)
    # the snapshot was taken before the fourth update, when the first window was whole
    assert loop.learner.weight == 3
    assert loop.policy.weight == 3
    assert (8, {"rollback": 1.0, "learning_rate_factor": 0.3}) in loop.tracker.rows


def test_a_run_ends_early_after_its_last_rollback() -> None:
    loop = guarded(make_loop({"train.max_rollbacks": 1}, steps=40, play=falls_after(6)))
    loop.training.run()
    assert loop.training.ended_early == loop.training.state.safety.events[-1]
    assert loop.training.state.step < 40
    assert loop.learner.rates[-1] == pytest.approx(0.3)


def test_a_loss_that_is_not_finite_is_rolled_back_instead_of_ending_the_run() -> None:
    def fail_once(weight: int) -> None:
        if weight == 2 and not loop.training.state.safety.rollbacks:
            raise NotFiniteError("group 0: the loss is nan")

    loop = guarded(make_loop(steps=4))
    loop.learner.on_step = fail_once
    loop.training.run()
    assert loop.training.state.step == 4
    assert loop.training.state.safety.events == (
        "step 2: group 0: the loss is nan; the run went back to the weights of the beginning with 0.3 of its learning "
        "rate",
    )
    assert loop.learner.rates == [1.0, 1.0, 0.3, 0.3]


def test_a_held_out_score_that_fell_rolls_back() -> None:
    def evaluate(step: int) -> float:
        loop.training.held_out_fall = "the held-out reward fell from 0.9 to 0.1" if step == 4 else None
        return {2: 0.9, 4: 0.1}[step]

    loop = guarded(make_loop({"eval.every": 2}, steps=5))
    loop.training.run(evaluate)
    assert loop.training.state.safety.restored_step == 2
    assert loop.learner.weight == 3  # two steps until the best evaluation, and the last one


def test_a_resumed_run_collapses_and_goes_back_like_one_that_was_never_interrupted(tmp_path: Path) -> None:
    whole = guarded(make_loop(steps=12, play=falls_after(6)))
    whole.training.run()
    first = guarded(make_loop(steps=12, play=falls_after(6), checkpoints=tmp_path))
    for _ in range(8):
        first.training._judge(first.training.step(), 12)
    first.training.checkpoint()
    again = guarded(make_loop(steps=12, play=falls_after(6)))
    again.training.resume(step_folder(tmp_path, 8), read_checkpoint(step_folder(tmp_path, 8)))
    again.training.run()
    assert again.training.state == whole.training.state
    assert again.learner.weight == whole.learner.weight


@pytest.mark.parametrize("settings", [{}, {"lora.r": 2}], ids=["all weights", "adapter"])
def test_a_learner_goes_back_to_the_weights_of_a_snapshot(settings: dict[str, Any]) -> None:
    config = RunConfig.build(settings, {"train.learning_rate": 0.1})
    model = with_adapter(load_model("palestra/tiny").model, config)
    learner = LocalLearner(model, config=config)
    snapshot = learner.snapshot()
    before = {name: weight.clone() for name, weight in snapshot.items()}
    with torch.no_grad():
        for weight in learner.weights(0).tensors().values():
            weight.add_(1.0)
    learner.restore(snapshot)
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights(1).tensors().items())


SHORT = {
    "train.max_steps": 3, "train.problems_per_step": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 60,
    "eval.cases": 24, "track.rollouts_every": 0,
}  # fmt: skip


def trained(folder: Path, **settings: Any) -> Any:
    config = demo.config | SHORT | {name.replace("__", "."): value for name, value in settings.items()}
    return train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out, folder=folder, progress=False)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"lora__r": 4}, marks=pytest.mark.slow("make test-slow takes both"))]
)
def test_a_run_with_a_learning_rate_a_hundred_times_too_high_returns_a_model_that_is_not_worse(settings, tmp_path):
    result = trained(tmp_path, train__learning_rate=0.1, **settings)
    assert result.before.pass_rate.rate > 0.2
    assert result.after.mean_reward >= result.before.mean_reward
    [sentence] = [f.sentence for f in result.outcome.findings if f.kind == "returned_earlier"]
    assert sentence.removesuffix(".") in result.outcome.events
    run = RunFolder.open(tmp_path)
    assert run.record["returned_because"] in sentence
    report = run.report()
    assert report is not None
    assert report["after"]["pass_rate"]["rate"] == result.after.pass_rate.rate
    assert sentence in [finding["sentence"] for finding in report["findings"]]
    if not settings:
        saved, initial = result.outcome.model.state_dict(), load_model("palestra/tiny").model.state_dict()
        assert all(torch.equal(saved[name], weight) for name, weight in initial.items())


def test_weights_that_are_not_finite_are_rolled_back_and_never_returned(tmp_path, monkeypatch) -> None:
    step = LocalLearner.optim_step
    monkeypatch.setattr(LocalLearner, "optim_step", lambda learner, rate, **more: step(learner, rate * 1e35, **more))
    result = trained(tmp_path, eval__cases=6)
    assert result.after.mean_reward == result.before.mean_reward
    assert "not finite" in result.outcome.events[0]
    assert all(torch.isfinite(weight).all() for weight in result.outcome.model.state_dict().values())


def test_the_best_weights_of_the_run_are_returned_if_they_score_more_than_the_first(tmp_path, monkeypatch) -> None:
    score, values, phases = Run._score, iter([0.3, 0.1, 0.5]), []

    def scored(run: Run, phase: str) -> EvalReport:
        phases.append(phase)
        report = score(run, phase)
        return replace(report, reward=replace(report.reward, value=next(values)))

    monkeypatch.setattr(Run, "_score", scored)
    result = trained(tmp_path, train__max_steps=WINDOW + 1, eval__cases=2)
    assert phases == ["scoring before", "scoring after", f"scoring the weights of step {WINDOW - 1}"]
    assert result.after.mean_reward == 0.5
    assert RunFolder.open(tmp_path).record["returned_step"] == WINDOW - 1
