"""Steps with signal in few groups make smaller updates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loop_fakes import Loop, attempt, make_loop

from palestra.core.types import Group, Rollout, Turn
from palestra.train.group_source import StepRollouts
from palestra.train.schedule import update_scale

EIGHT = {"train.problems_per_step": 8, "train.refill_limit": 0, "train.full_update_share": 0.5}


def with_signal(*numbers: int) -> Callable[[int, str], Sequence[Rollout]]:
    """Signal in the groups of these draws alone."""
    return lambda number, problem: [attempt(problem, r) for r in ((0.0, 1.0) if number in numbers else (0.0, 0.0))]


def scales(loop: Loop) -> list[float]:
    return [row["update_scale"] for _, row in loop.tracker.rows]


@pytest.mark.parametrize(("signal", "scale"), [(0, 0.0), (1, 0.125), (4, 0.5), (8, 1.0), (32, 1.0)])
def test_the_scale_is_proportional_up_to_the_share_of_a_full_update(signal: int, scale: float) -> None:
    assert update_scale(signal, 0, 32, 0.25) == scale


def test_solved_groups_do_not_make_an_update_smaller_but_failed_ones_do() -> None:
    def play(reward: float) -> Callable[[int, str], Sequence[Rollout]]:
        return lambda number, problem: [attempt(problem, r) for r in ((0.0, 1.0) if number < 4 else (reward, reward))]

    options = {"train.problems_per_step": 32, "train.refill_limit": 0}
    for reward, rate in ((1.0, 1.0), (0.0, 0.5)):
        loop = make_loop(options, steps=1, play=play(reward))
        loop.training.run()
        assert loop.learner.rates == [rate]


@pytest.mark.parametrize(("signal", "solved", "scale"), [(0, 64, 0.0), (1, 63, 1.0), (1, 7, 0.5), (1, 0, 1 / 16)])
def test_solved_groups_count_like_those_with_signal(signal: int, solved: int, scale: float) -> None:
    assert update_scale(signal, solved, 64, 0.25) == scale


def test_a_step_with_one_group_of_eight_with_signal_is_applied_at_a_quarter_of_the_learning_rate() -> None:
    loop = make_loop(EIGHT, steps=3, play=with_signal(3, *range(8, 12)))
    loop.training.run()
    assert loop.learner.rates == [0.25, 1.0]
    assert scales(loop) == [0.25, 1.0, 0.0]
    assert [row["signal_groups"] for _, row in loop.tracker.rows] == [1.0, 4.0, 0.0]
    assert [row["learning_rate"] for _, row in loop.tracker.rows[:2]] == [0.25, 1.0]


def test_a_share_of_0_applies_one_group_at_the_full_learning_rate() -> None:
    loop = make_loop(EIGHT, {"train.full_update_share": 0}, steps=1, play=with_signal(3))
    loop.training.run()
    assert loop.learner.rates == [1.0]


def test_refilled_groups_count_towards_a_full_update() -> None:
    loop = make_loop(
        EIGHT, {"train.refill_limit": 1, "train.signal_share": 0.5}, steps=1, play=with_signal(1, 9, 10, 11)
    )
    loop.training.run()
    assert loop.learner.rates == [1.0]


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
    loop.training.learn(StepRollouts([group], [[-1.0, 1.0]], 0, 0.0))
    assert loop.learner.rates == [1.0]
