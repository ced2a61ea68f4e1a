"""Steps with signal in few groups: scaled updates, accumulated groups, and an exact resume in between."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loop_fakes import Loop, attempt, make_loop

from palestra.core.config import RunConfig
from palestra.core.types import Group, Rollout, Turn
from palestra.train.checkpoint import TrainState, read_checkpoint, step_folder
from palestra.train.group_source import StepRollouts
from palestra.train.low_signal import MAX_ACCUMULATED_STEPS, PendingGroups, plan_update, update_scale

EIGHT = {"train.problems_per_step": 8, "train.refill_limit": 0, "train.full_update_share": 0.5}
ACCUMULATE = EIGHT | {"train.low_signal": "accumulate"}


def with_signal(*numbers: int) -> Callable[[int, str], Sequence[Rollout]]:
    """Signal in the groups of these draws alone."""
    return lambda number, problem: [attempt(problem, r) for r in ((0.0, 1.0) if number in numbers else (1.0, 1.0))]


def scales(loop: Loop) -> list[float]:
    return [row["update_scale"] for _, row in loop.tracker.rows]


def pending(loop: Loop) -> list[float]:
    return [row["pending_groups"] for _, row in loop.tracker.rows]


@pytest.mark.parametrize(("signal", "scale"), [(0, 0.0), (1, 0.125), (4, 0.5), (8, 1.0), (32, 1.0)])
def test_the_scale_is_proportional_up_to_the_share_of_a_full_update(signal: int, scale: float) -> None:
    assert update_scale(signal, 32, 0.25) == scale


def test_a_step_with_one_group_of_eight_with_signal_is_applied_at_a_quarter_of_the_learning_rate() -> None:
    loop = make_loop(EIGHT, steps=3, play=with_signal(3, *range(8, 12)))
    loop.training.run()
    assert loop.learner.rates == [0.25, 1.0]
    assert scales(loop) == [0.25, 1.0, 0.0]
    assert [row["signal_groups"] for _, row in loop.tracker.rows] == [1.0, 4.0, 0.0]
    assert [row["learning_rate"] for _, row in loop.tracker.rows[:2]] == [0.25, 1.0]


def test_off_applies_one_group_at_the_full_learning_rate() -> None:
    loop = make_loop(EIGHT, {"train.low_signal": "off"}, steps=1, play=with_signal(3))
    loop.training.run()
    assert loop.learner.rates == [1.0]


def test_refilled_groups_count_towards_a_full_update() -> None:
    loop = make_loop(
        EIGHT, {"train.refill_limit": 1, "train.signal_share": 0.5}, steps=1, play=with_signal(1, 9, 10, 11)
    )
    loop.training.run()
    assert loop.learner.rates == [1.0]


def test_accumulated_groups_are_applied_together_once_there_are_enough() -> None:
    loop = make_loop(ACCUMULATE, steps=4, play=with_signal(0, 8, 9, 17, *range(24, 32)))
    loop.training.run()
    assert loop.learner.rates == [1.0, 1.0]
    # the third step trains its own group and the three that waited, at three sampled tokens a rollout
    assert [loss.policy_tokens for loss in loop.learner.losses] == [4 * 2 * 3, 8 * 2 * 3]
    assert (scales(loop), pending(loop)) == ([0.0, 0.0, 1.0, 1.0], [1.0, 3.0, 0.0, 0.0])
    assert [call for call in loop.calls if call.startswith("update")] == ["update 1", "update 2"]


def test_accumulation_ends_after_a_number_of_steps_with_a_scaled_update() -> None:
    loop = make_loop(ACCUMULATE, steps=MAX_ACCUMULATED_STEPS + 3, play=with_signal(8, 16))
    loop.training.run()
    applied = [step for step, row in loop.tracker.rows if row["update_scale"]]
    assert applied == [1 + MAX_ACCUMULATED_STEPS]  # the first step has no group that could wait
    assert loop.learner.rates == [0.5]


def test_the_last_step_applies_what_is_pending() -> None:
    loop = make_loop(ACCUMULATE, steps=2, play=with_signal(0))
    loop.training.run()
    assert (loop.learner.rates, loop.training.state.pending) == ([0.25], PendingGroups())


def test_a_resume_goes_on_with_the_pending_groups(tmp_path: Path) -> None:
    play = with_signal(0, 8, 9, 17)
    whole = make_loop(ACCUMULATE, steps=3, play=play)
    whole.training.run()
    first = make_loop(ACCUMULATE, {"checkpoint.every": 2}, steps=3, play=play, checkpoints=tmp_path)
    for _ in range(2):
        first.training.step()
    first.training.checkpoint()
    again = make_loop(ACCUMULATE, steps=3, play=play)
    again.training.resume(step_folder(tmp_path, 2), read_checkpoint(step_folder(tmp_path, 2)))
    again.training.run()
    assert again.learner.losses == whole.learner.losses
    assert again.training.state == whole.training.state


def test_the_state_of_a_checkpoint_survives_json() -> None:
    group = Group("p", (attempt("p", 0.0), attempt("p", 1.0)))
    state = TrainState(step=3, pending=PendingGroups((group,), 2))
    again = TrainState.from_dict(state.to_dict())
    assert again.pending.steps == 2
    assert [r.reward for r in again.pending.groups[0].rollouts] == [0.0, 1.0]
    assert replace(again, pending=PendingGroups()) == TrainState(step=3)


def test_echo_makes_full_updates_also_where_no_group_has_signal() -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        turn = Turn("environment", (6, 7))  # type: ignore[arg-type]
        return [replace(r, turns=(*r.turns, turn)) for r in (attempt(problem, 1.0), attempt(problem, 1.0))]

    loop = make_loop(EIGHT, {"echo.coefficient": 0.5}, steps=1, play=play)
    loop.training.run()
    assert loop.learner.rates == [1.0]


def test_a_step_taken_by_hand_is_a_full_one_when_its_own_groups_have_signal() -> None:
    loop = make_loop(EIGHT, steps=None)
    group = Group("p", (attempt("p", 0.0), attempt("p", 1.0)))
    loop.training.learn(StepRollouts([group], 0, 0.0))
    assert loop.learner.rates == [1.0]


def test_pending_groups_come_after_those_of_the_step() -> None:
    old, new = (Group(name, (attempt(name, 0.0), attempt(name, 1.0))) for name in ("old", "new"))
    train = RunConfig.build(ACCUMULATE).train
    plan = plan_update([new], [[-1.0, 1.0]], PendingGroups((old,), 1), train, problems=4, is_last=False)
    assert ([group.problem_id for group in plan.groups], plan.scale) == (["new", "old"], 1.0)
