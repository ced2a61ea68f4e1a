"""Python functions, written to a description and run against tests in a sandbox."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable
from typing import Any

from palestra.core.types import Score
from palestra.envs.env import Env
from palestra.envs.sandbox import SandboxLimits
from palestra.envs.sandbox.config import MAX_SANDBOXES, SandboxConfig

_LIMITS = SandboxLimits(seconds=5.0, memory_mib=256, processes=8, output_bytes=32_000)
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
_CASES = 8
_ORDERS, _SIGNS = ((True, "largest"), (False, "smallest")), ((">", "more"), ("<", "fewer"))
Draw = Callable[[random.Random], Any]

# Runs in the sandbox, where the expected values are not: calls `solve` and writes what it gives.
_RUNNER = """
import json, sys
calls = json.load(sys.stdin)
scope = {"__name__": "solution"}
results = []
try:
    exec(compile(open("solution.py").read(), "solution.py", "exec"), scope)
    for arguments in calls:
        try:
            results.append({"value": scope["solve"](*arguments)})
        except Exception as error:
            results.append({"error": f"{type(error).__name__}: {error}"})
except Exception as error:
    results = [{"error": f"{type(error).__name__}: {error}"}] * len(calls)
with open("results.json", "w") as file:
    json.dump(results, file, default=repr)
"""


def _numbers(rng: random.Random) -> tuple[list[int]]:
    return ([rng.randint(-20, 60) for _ in range(rng.randint(3, 9))],)


def _sentence(rng: random.Random) -> tuple[str]:
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8))) for _ in range(rng.randint(2, 7)))
    return (" ".join(words),)


# The text of a task, code that is right, the arguments of a call, and what is drawn to fill in text and code.
_TASKS: tuple[tuple[str, str, Draw, Draw], ...] = (
    (
        "solve(numbers) returns {factor} times the sum of the numbers that are divisible by {k}.",
        "def solve(numbers):\n    return {factor} * sum(n for n in numbers if n % {k} == 0)\n",
        _numbers,
        lambda rng: {"k": rng.randint(2, 9), "factor": rng.randint(1, 9)},
    ),
    (
        "solve(numbers) returns a list of the {count} {name} numbers, the {name} first.",
        "def solve(numbers):\n    return sorted(numbers, reverse={order})[:{count}]\n",
        _numbers,
        lambda rng: {"count": rng.randint(1, 5)} | dict(zip(("order", "name"), rng.choice(_ORDERS), strict=True)),
    ),
    (
        "solve(numbers) returns the list turned {places} places to the left: the first number comes to the end, "
        "{places} times over.",
        "def solve(numbers):\n    k = {places} % len(numbers)\n    return numbers[k:] + numbers[:k]\n",
        _numbers,
        lambda rng: {"places": rng.randint(1, 7)},
    ),
    (
        "solve(text) returns how many words of the text have {name} than {length} letters.",
        "def solve(text):\n    return sum(len(word) {sign} {length} for word in text.split())\n",
        _sentence,
        lambda rng: {"length": rng.randint(1, 7)} | dict(zip(("sign", "name"), rng.choice(_SIGNS), strict=True)),
    ),
    (
        "solve(text) returns the text with every letter {old} replaced by {new}, and then turned round, so that it "
        "reads backwards.",
        "def solve(text):\n    return text.replace({old!r}, {new!r})[::-1]\n",
        _sentence,
        lambda rng: dict(zip(("old", "new"), rng.sample(string.ascii_lowercase, 2), strict=True)),
    ),
    (
        "A sequence begins with {first}, {second}; each further number is the sum of the two before it. solve(n) "
        "returns its number n, so that solve(0) is {first}.",
        "def solve(n):\n    a, b = {first}, {second}\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
        lambda rng: (rng.randint(0, 20),),
        lambda rng: {"first": rng.randint(0, 9), "second": rng.randint(1, 9)},
    ),
)


class PythonCode(Env):
    """Write a Python function that passes hidden tests."""

    name = "python-code"
    env_config_cls = SandboxConfig
    max_episodes = MAX_SANDBOXES
    instructions = (
        "Write the Python function that is asked for, named solve. You may try code out with the tool. "
        "Answer with the whole function in one ```python block."
    )

    def setup(self) -> None:
        self.config.check()

    def make_problem(self, rng: random.Random) -> Any:
        while True:
            text, code, arguments, draw = _TASKS[rng.randrange(len(_TASKS))]
            words, scope = draw(rng), dict[str, Any]()
            text, code = text.format(**words), code.format(**words)
            exec(code, scope)  # our own code, not a model's
            solve, example = scope["solve"], arguments(rng)
            calls, results = list[Any](), list[Any]()  # other than the example; at most two have the same result
            for _ in range(5 * _CASES):
                call = arguments(rng)
                result = solve(*call)
                if call != example and results.count(result) < 2:
                    calls.append(call)
                    results.append(result)
            if len(calls) >= _CASES:  # a few tasks have almost always the same result
                break
        return {
            "input": f"{text}\n\nFor example, solve({', '.join(map(repr, example))}) gives {solve(*example)!r}.",
            "expect": results[:_CASES],
            "calls": calls[:_CASES],
            "code": code,
        }

    def start(self) -> None:
        self.sandbox = self.config.sandbox(_LIMITS)

    def run_python(self, code: str) -> str:
        """Run a Python program, and give what it prints.

        Args:
            code: The whole program.
        """
        self.sandbox.write("tried.py", code)
        ran = self.sandbox.run([self.sandbox.python, "-I", "tried.py"])
        return ran.output + (f"[stopped: {ran.stopped}]" if ran.stopped else "")

    def score(self, answer: str) -> Score:
        blocks = _BLOCK.findall(answer)
        if not blocks:
            return Score(0.0, False, "the answer has no block of code")
        results = self._results(blocks[-1])
        expect = self.problem.expect
        right = sum(result.get("value", ...) == value for result, value in zip(results, expect, strict=False))
        constant = max(expect.count(value) for value in expect)  # what one constant answer would get counts as nothing
        share = max(0, right - constant) / (len(expect) - constant)
        first_error = next((str(result["error"])[:500] for result in results if "error" in result), "")
        return Score(share, right == len(expect), f"{right} of {len(expect)} tests passed. {first_error}".strip())

    def _results(self, code: str) -> list[dict[str, Any]]:
        self.sandbox.write("solution.py", code)
        self.sandbox.write("runner.py", _RUNNER)
        self.sandbox.write("results.json", "[]")
        ran = self.sandbox.run([self.sandbox.python, "-I", "runner.py"], stdin=json.dumps(self.problem.row["calls"]))
        try:
            results = json.loads(self.sandbox.read("results.json") or "[]")
        except (ValueError, RecursionError):  # the solution may write there, too
            results = []
        if not isinstance(results, list) or not all(isinstance(row, dict) for row in results) or not results:
            return [{"error": f"stopped: {ran.stopped}" if ran.stopped else "the code gave no results"}]
        return results

    def close(self) -> None:
        self.sandbox.close()
