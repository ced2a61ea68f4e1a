"""Python functions, written to a description and run against tests in a sandbox."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from palestra.core.types import Score
from palestra.envs.env import Env
from palestra.envs.library._functions import TASKS
from palestra.envs.sandbox import PYTHON, Sandbox, SandboxLimits

_LIMITS = SandboxLimits(seconds=5.0, memory_mib=256, processes=8, output_bytes=32_000)
_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)(?:```|\Z)", re.DOTALL)
_CASES = 8

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


class PythonCode(Env):
    """Write a Python function that passes hidden tests."""

    name = "python-code"
    instructions = (
        "Write the Python function that is asked for, named solve. You may try code out with the tool. "
        "Answer with the whole function in one ```python block."
    )

    def make_problem(self, rng: random.Random) -> Any:
        make: Callable[[random.Random], Any] = rng.choice(TASKS)
        task = make(rng)
        calls = [task.arguments(rng) for _ in range(_CASES)]
        return {
            "input": f"{task.text}\n\nFor example, solve({', '.join(map(repr, calls[0]))}) gives "
            f"{task.function(*calls[0])!r}.",
            "expect": [task.function(*call) for call in calls],
            "calls": calls,
            "code": task.code,
        }

    def start(self) -> None:
        self.sandbox = Sandbox(_LIMITS)

    def run_python(self, code: str) -> str:
        """Run a Python program, and give what it prints.

        Args:
            code: The whole program.
        """
        self.sandbox.write("tried.py", code)
        ran = self.sandbox.run([PYTHON, "-I", "tried.py"])
        return ran.output + (f"[stopped: {ran.stopped}]" if ran.stopped else "")

    def score(self, answer: str) -> Score:
        blocks = _BLOCK.findall(answer)
        if not blocks:
            return Score(0.0, False, "the answer has no block of code")
        results = self._results(blocks[-1])
        expect = self.problem.expect
        right = [result.get("value", ...) == value for result, value in zip(results, expect, strict=False)]
        share = sum(right) / len(expect)
        first_error = next((result["error"] for result in results if "error" in result), "")
        return Score(share, share == 1.0, f"{sum(right)} of {len(expect)} tests passed. {first_error}".strip())

    def _results(self, code: str) -> list[dict[str, Any]]:
        self.sandbox.write("solution.py", code)
        self.sandbox.write("runner.py", _RUNNER)
        self.sandbox.write("results.json", "[]")
        ran = self.sandbox.run([PYTHON, "-I", "runner.py"], stdin=json.dumps(self.problem.row["calls"]))
        try:
            results = json.loads(self.sandbox.read("results.json") or "[]")
        except ValueError:
            results = []
        if not isinstance(results, list) or not all(isinstance(row, dict) for row in results) or not results:
            return [{"error": f"stopped: {ran.stopped}" if ran.stopped else "the code gave no results"}]
        return results

    def close(self) -> None:
        self.sandbox.close()
