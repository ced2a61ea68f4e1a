"""Every ready environment, through the real loop: a perfect policy scores 1, an empty one 0, and nothing leaks."""

import asyncio
import json
import os
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from palestra.core.types import Finish, Message, Problem, Rollout, SamplingParams, ToolCall
from palestra.envs.discover import discover, load_env
from palestra.envs.running import RunningEnv
from palestra.extras.environments.reasoning_gym import WRONG_SCORERS, task_names
from palestra.rollout.agent_loop import AttemptLimits, endpoint_speakers
from palestra.rollout.collect import AgentLoop, Collector

REPOSITORY = Path(__file__).parents[2]
TREASURE = str(REPOSITORY / "benchmarks" / "treasure.py")  # several turns, and no tools
PYTHON_CODE = str(REPOSITORY / "examples" / "python_code.py")
way = runpy.run_path(TREASURE)["way"]
Solver = Callable[[Problem, Sequence[Message]], Message]


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("call_0", name, arguments),))


def say(text: Any) -> Message:
    return Message("assistant", str(text))


def tool_answers(messages: Sequence[Message]) -> list[str]:
    return [m.text for m in messages if m.role == "tool"]


def calculator(problem: Problem, messages: Sequence[Message]) -> Message:
    answers = tool_answers(messages)
    return say(f"It is {answers[0]}.") if answers else call("calculate", expression=problem.row["expression"])


def catalogue(problem: Problem, messages: Sequence[Message]) -> Message:
    items, field, answers = problem.row["items"], problem.row["field"], tool_answers(messages)
    if len(answers) < 2:
        return call("look_up", item=items[len(answers)])
    one, other = (json.loads(answer)[field] for answer in answers)
    if "together" in str(problem.input):
        return say(one + other)
    if "Which" in str(problem.input):
        return say("equal" if one == other else items[0] if one > other else items[1])
    return say(one)


def sql(problem: Problem, messages: Sequence[Message]) -> Message:
    answers = tool_answers(messages)
    return say(json.loads(answers[0])[0][0]) if answers else call("query", sql=problem.row["query"])


def treasure(problem: Problem, messages: Sequence[Message]) -> Message:
    row = problem.row
    path = [f"go {d}" for d in way(row["start"], row["key"])] + ["take key"]
    path += [f"go {d}" for d in way(row["key"], row["chest"])] + ["open chest"]
    return say(path[sum(m.role == "assistant" for m in messages)])


def shell(problem: Problem, messages: Sequence[Message]) -> Message:
    row, question, answers = problem.row, str(problem.input), tool_answers(messages)
    if answers:
        return say(f"Done: {answers[0]}")
    if "target" in row:
        return call("shell", command=f"LC_ALL=C sort -u {row['source']} > {row['target']}")
    if "the word" in question:
        word = question.split("the word ")[1].rstrip("?")
        return call("shell", command=f"cat */* | grep -cw {word}")
    return call("shell", command=f"wc -l < {question.split('the file ')[1].split()[0]}")


def python_code(problem: Problem, messages: Sequence[Message]) -> Message:
    return say(f"Here it is:\n```python\n{problem.row['code']}```")


SOLVERS: dict[str, Solver] = {
    "calculator": calculator,
    "catalogue": catalogue,
    "sql": sql,
    TREASURE: treasure,
    "shell": shell,
    PYTHON_CODE: python_code,
}


def empty(problem: Problem, messages: Sequence[Message]) -> Message:
    return say("")


@dataclass(frozen=True)
class Scripted:
    """Answers as the solver says; it finds the problem by its question."""

    solver: Solver
    problems: dict[str, Problem]

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], sampling: SamplingParams
    ) -> tuple[Message, Finish, int]:
        asked = next(m.text for m in messages if m.role == "user")
        return self.solver(self.problems[asked], messages), "stop", 1


def attempt(env: RunningEnv, problems: Sequence[Problem], solver: Solver, group_size: int = 1) -> list[Rollout]:
    chat = Scripted(solver, {str(p.input): p for p in problems})
    collector = Collector(
        env, AgentLoop(AttemptLimits(SamplingParams(100), max_tool_rounds=5), endpoint_speakers(chat))
    )
    groups = asyncio.run(collector.collect(problems, group_size, [p.id for p in problems]))
    return [rollout for group in groups for rollout in group.rollouts]


def unique(problems: Sequence[Problem], count: int) -> list[Problem]:
    return list({str(p.input): p for p in problems[:count]}.values())


def test_every_built_in_environment_is_in_this_test():
    names = {e.name for e in discover().environments if e.origin == "built-in" and not e.preset}
    assert names == set(SOLVERS) - {TREASURE, PYTHON_CODE}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_perfect_policy_scores_1(name, split):
    env = load_env(name)
    rollouts = attempt(env, unique(env.problems(split), 12), SOLVERS[name])
    assert [(r.reward, r.passed, r.error) for r in rollouts] == [(1.0, True, None)] * len(rollouts)
    assert all(score.reason for rollout in rollouts for score in rollout.scores.values())


@pytest.mark.parametrize("name", SOLVERS)
def test_an_empty_policy_scores_0(name):
    env = load_env(name)
    rollouts = attempt(env, unique(env.problems("train"), 6), empty)
    assert [(r.reward, r.passed, r.error) for r in rollouts] == [(0.0, False, None)] * len(rollouts)


@pytest.mark.parametrize("name", SOLVERS)
def test_held_out_problems_are_never_trained_on(name):
    env = load_env(name, {"train_size": 300})
    train, held_out = ({(str(p.input), str(p.expect)) for p in env.problems(split)} for split in ("train", "held_out"))
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("name", SOLVERS)
def test_siblings_do_not_disturb_each_other(name):
    env = load_env(name)
    (problem,) = unique(env.problems("train"), 1)
    turns = iter([SOLVERS[name], empty] * 100)
    chosen: dict[int, Solver] = {}

    def mixed(given: Problem, messages: Sequence[Message]) -> Message:
        task = id(asyncio.current_task())
        return chosen.setdefault(task, next(turns))(given, messages)

    rewards = [rollout.reward for rollout in attempt(env, [problem], mixed, group_size=6)]
    assert sorted(rewards) == [0.0] * 3 + [1.0] * 3


@pytest.mark.parametrize("name", SOLVERS)
def test_seeds_repeat(name):
    first, again = (load_env(name, {"seed": 5}).problems("train")[3] for _ in range(2))
    assert (first.input, first.expect) == (again.input, again.expect)
    assert load_env(name, {"seed": 6}).problems("train")[3] != first


needs_reasoning_gym = pytest.mark.skipif(not task_names(), reason="reasoning-gym is not installed")
# the datasets that state no answer keep an example of one in the metadata, or none at all
_EXAMPLES = {
    "graph_color": lambda m: json.dumps(m["possible_answer"]),
    "propositional_logic": lambda m: m["example_answer"],
    "rubiks_cube": lambda m: m["example_correct_answer"],
}
_UNSOLVED = {"boxnet", "rush_hour"}
# one that states its answers and one of those that do not; `make test-slow` tries them all
_SAMPLE = ["chain_sum", "graph_color"]
TASKS = [t for t in task_names() if t in _SAMPLE or (os.environ.get("PALESTRA_TEST_SLOW") and t not in WRONG_SCORERS)]


@needs_reasoning_gym
def test_every_dataset_of_reasoning_gym_is_listed():
    from reasoning_gym.factory import DATASETS

    listed = {e.name for e in discover().environments if e.preset}
    assert listed == {f"reasoning_gym/{name}" for name in DATASETS if name != "composite"}


@needs_reasoning_gym
@pytest.mark.parametrize("task", TASKS)
def test_every_dataset_of_reasoning_gym_tells_right_from_empty(task):
    env = load_env(f"reasoning_gym/{task}", {"train_size": 3, "held_out_size": 2})
    problem = env.problems("train")[0]
    assert [r.reward for r in attempt(env, [problem], empty)] == [0.0]
    if task in _UNSOLVED:
        return
    answer = _EXAMPLES[task](problem.row["entry"]["metadata"]) if task in _EXAMPLES else problem.expect
    (rollout,) = attempt(env, [problem], lambda *_: say(f"I think <answer>{answer}</answer>"))
    assert (rollout.reward, rollout.passed) == (1.0, True)
