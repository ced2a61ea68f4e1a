"""Environments that show solved problems first, for models that need to see how."""

import pytest

from palestra.core.types import Problem
from palestra.envs.running import RunningEnv
from palestra.extras.environments.calculator import Calculator, CalculatorConfig


def opening(problem: Problem, env: RunningEnv) -> list[str]:
    return [message.role for message in env.open(problem).prompt]


def test_the_calculator_shows_whole_solutions_before_the_question() -> None:
    env = RunningEnv(Calculator(CalculatorConfig(shots=2, train_size=4, held_out_size=2)))
    problem = env.problems("train")[0]
    solved = ["user", "assistant", "tool", "assistant"]
    assert opening(problem, env) == ["system", *solved, *solved, "user"]
    call = env.open(problem).prompt[2].tool_calls[0]
    assert env.open(problem).prompt[3].text == str(Calculator().calculate(**call.arguments))
    env = RunningEnv(Calculator(CalculatorConfig(train_size=4, held_out_size=2)))
    assert isinstance(env.problems("train")[0].input, str)


def test_reasoning_gym_shows_solved_training_problems_and_takes_bare_answers() -> None:
    pytest.importorskip("reasoning_gym")
    from palestra.extras.environments.reasoning_gym import ReasoningGym, ReasoningGymConfig

    config = ReasoningGymConfig(task="chain_sum", shots=2, answer_tags=False, train_size=8, held_out_size=4)
    env = RunningEnv(ReasoningGym(config))
    problem = env.problems("held_out")[0]
    assert opening(problem, env) == ["system", "user", "assistant", "user", "assistant", "user"]
    attempt = env.open(problem).env
    assert attempt.score(str(problem.expect)).value == 1.0
    assert attempt.score("<answer>").value < 1.0
