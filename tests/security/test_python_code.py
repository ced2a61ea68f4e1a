"""The environment of examples/python_code.py against answers that want the reward without the work."""

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from palestra.core.types import Problem
from palestra.envs.env import as_problem

PythonCode: Any = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "python_code.py"))["PythonCode"]

RESULTS_OF_THE_SOLUTION = {
    "deep": "open('results.json', 'w').write('[' * 31000)",
    "folder": "os.remove('results.json'); os.makedirs('results.json/x'); os.chmod('results.json', 0)",
    "full disk": "open('fill', 'wb').write(bytes(80 * 2**20))",
    "values": "open('results.json', 'w').write('[{\"error\": [1]}, {\"value\": NaN}]')",
}


class NoSandbox:
    """Answers with results as a sandbox would, without starting one."""

    def __init__(self, results: str) -> None:
        self.results, self.python = results, "python3"

    def write(self, name: str, text: str) -> None: ...

    def run(self, command, stdin=""):
        class Ran:
            stopped = None

        return Ran

    def read(self, name: str) -> str:
        return self.results

    def close(self) -> None: ...


def attempt(problem: Problem, results: str) -> PythonCode:
    env = PythonCode()
    env.problem = problem
    env.sandbox = NoSandbox(results)  # type: ignore[assignment]
    return env


def problems(count: int) -> list[Problem]:
    return [as_problem(PythonCode().make_problem(random.Random(i)), str(i)) for i in range(count)]


ANSWER = "```python\ndef solve(*a): return 0\n```"


def test_a_constant_answer_is_worth_nothing():
    for problem in problems(100):
        for value in [0, "", [], *problem.expect]:
            score = attempt(problem, json.dumps([{"value": value}] * 8)).score(ANSWER)
            assert score.value == 0
            assert not score.passed


def test_the_right_answer_gets_everything():
    for problem in problems(50):
        score = attempt(problem, json.dumps([{"value": value} for value in problem.expect])).score(ANSWER)
        assert score.value == 1
        assert score.passed


def test_the_example_in_the_question_is_none_of_the_hidden_tests():
    for problem in problems(200):
        example = str(problem.input).rpartition("For example, ")[2]
        calls = [f"solve({', '.join(map(repr, call))}) gives" for call in problem.row["calls"]]
        assert not [call for call in calls if example.startswith(call)]


@pytest.mark.parametrize("results", ["[" * 31_000, "[7]", '[{"error": [1]}]', '[{"value": NaN}]', "{}", "\udcff", ""])
def test_whatever_a_solution_writes_as_results_is_scored(results):
    assert attempt(problems(1)[0], results).score(ANSWER).value == 0


@pytest.mark.parametrize("attack", RESULTS_OF_THE_SOLUTION)
def test_whatever_a_solution_does_to_the_results_file_is_scored(attack):
    env = PythonCode()
    env.problem = problems(1)[0]
    env.start()
    code = f"import os, atexit\natexit.register(lambda: os._exit(0))\ntry:\n    {RESULTS_OF_THE_SOLUTION[attack]}\n"
    code += "except OSError:\n    pass\nos._exit(0)"
    try:
        assert env.score(f"```python\n{code}\n```").value == 0
        assert env.score(ANSWER).value == 0
    finally:
        env.close()
