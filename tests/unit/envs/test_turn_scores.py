"""Environments and measures that score single turns, and name the state that an attempt is in."""

from __future__ import annotations

import numpy as np
import pytest
from builders import add
from playing import attempt

from palestra import Agent, Env, EvalSuite, measure, turn_scores
from palestra.core.errors import InputError, PalestraError
from palestra.core.types import Message, ToolCall
from palestra.envs.running import RunningEnv
from palestra.envs.suite_env import SuiteEnvironment
from palestra.evals.measures import Measure, as_score


class Doors(Env):
    """Open three doors, one a turn."""

    def problems(self, split):
        return [("Which door?", "c")]

    def start(self):
        self.opened = []

    def step(self, answer):
        self.opened.append(answer)
        return None if len(self.opened) == 3 else f"Door {answer} is open."

    def state_key(self):
        return ("doors", *self.opened) if self.opened else None

    def score(self, answer):
        return answer == self.problem.expect

    def score_turns(self):
        return [0.1 * (door in "abc") for door in self.opened]


def doors(*names):
    """A speaker that opens these doors, one after the other."""
    return lambda messages: names[sum(m.role == "assistant" for m in messages)]


def test_values_of_turns_are_scores_that_add_up_to_the_reward():
    [group] = attempt(RunningEnv(Doors()), doors("a", "x", "c"))
    [rollout] = group.rollouts
    assert rollout.scores["turns"].turns == pytest.approx((0.1, 0.0, 0.1))
    assert rollout.scores["turns"].passed is None
    assert rollout.passed
    assert rollout.reward == pytest.approx(1.2)

    class Several(Doors):
        def score_turns(self):
            return {"right": [0.0, 0.0, 1.0], "quick": np.array([0.5, 0.0, 0.0])}

    [group] = attempt(RunningEnv(Several()), doors("a", "b", "c"))
    scores = group.rollouts[0].scores
    assert scores["right"].turns == (0.0, 0.0, 1.0)
    assert scores["quick"].value == 0.5


def test_states_are_named_before_each_turn_only_if_all_have_a_key():
    class Named(Doors):
        def state_key(self):
            return " ".join(["doors", *self.opened, "x" * 500 * len(self.opened)])

    [group] = attempt(RunningEnv(Named()), doors("a", "b", "c"), group_size=2)
    first, second = (rollout.states for rollout in group.rollouts)
    assert first == second
    assert len(first) == 3
    assert first[0] == "doors "
    assert len(first[1]) == 32, "a long key is hashed"
    [group] = attempt(RunningEnv(Doors()), doors("a", "b", "c"))
    assert len(group.rollouts[0].states) == 2, "the first turn has none, so observations tell states apart"

    class Broken(Doors):
        def state_key(self):
            raise KeyError("room")

    with pytest.raises(PalestraError, match="state_key raised KeyError"):
        attempt(RunningEnv(Broken()), doors("a", "b", "c"))


def test_a_measure_may_return_a_list_with_a_value_for_each_turn():
    @measure
    def calls(ctx):
        return [0.25 * len(message.tool_calls) for message in ctx.turns]

    @measure
    def right(ctx):
        return turn_scores([0.0, 1.0], passed=True, reason="answered")

    suite = EvalSuite.from_records([{"input": "1 + 1?"}], measures=[calls, right])

    def speak(messages):
        if any(m.role == "tool" for m in messages):
            return "2"
        return Message("assistant", "", (ToolCall("c0", "add", {"a": 1, "b": 1}),))

    [group] = attempt(SuiteEnvironment(Agent("adder", "palestra/tiny", "Add.", [add]), suite), speak)
    [rollout] = group.rollouts
    assert rollout.scores["calls"].turns == (0.25, 0.0)
    assert rollout.scores["right"].reason == "answered"
    assert rollout.passed
    assert rollout.reward == pytest.approx(0.5 * 0.25 + 0.5 * 1.0)


def test_values_that_are_no_numbers_are_refused():
    with pytest.raises(InputError, match="one number for each turn"):
        turn_scores(["much"])
    assert as_score(Measure("m", len), [0.0, float("inf")]).error
