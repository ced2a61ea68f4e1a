"""Count the files and functions of palestra that one step of a small CPU training executes.

    python scripts/step_calls.py                                  # this checkout
    PYTHONPATH=<checkout>/src python scripts/step_calls.py        # another one
    python scripts/step_calls.py --list                           # also each file with its functions
    python scripts/step_calls.py --program                        # the requests of a user's program, until stored

It trains the embedded model on the demo agent for two steps of 4 problems x 4 attempts, and profiles the second step
in all threads of this process. With `--program` the agent is a function that makes two chat completion requests, the
second one with the result of the first one's tool call; profiled is one group of 4 attempts, from the arrival of the
first request until the rollouts are written. Lambdas and comprehensions count as functions.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import logging
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import palestra
from palestra import demo, train_grpo
from palestra.train.loop import Training

SETTINGS = {
    "seed": 0,
    "train.max_steps": 2,
    "train.problems_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 60,
    "eval.cases": 4,
    "eval.every": 0,
    "checkpoint.every": 0,
}
SOURCE = str(Path(palestra.__file__).parent) + os.sep
PROFILED_STEP = 1
MODEL_CODE = ("engine/", "models/", "learner/")  # counted apart with --program

Function = tuple[str, int, str]  # file below src/palestra, first line, name


class Profiler:
    """Notes the functions below src/palestra that any thread calls while `recording`."""

    def __init__(self) -> None:
        self.recording = False
        self._codes: set[CodeType] = set()

    def __enter__(self) -> Profiler:
        threading.setprofile(self._note)  # before any thread starts
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self.recording and event == "call":
            self._codes.add(frame.f_code)

    def functions(self) -> set[Function]:
        here = {code for code in self._codes if code.co_filename.startswith(SOURCE)}
        return {(code.co_filename.removeprefix(SOURCE), code.co_firstlineno, code.co_qualname) for code in here}


def train(agent: Any, profiler: Profiler, settings: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, profiler:
        config = {**demo.config, **SETTINGS, **settings, "output_dir": folder}
        train_grpo(agent, demo.suite, config=config, held_out=demo.held_out, progress=False)


def functions_of_a_step() -> set[Function]:
    """The functions that the second step executes."""
    profiler, step = Profiler(), Training.step

    def profiled_step(training: Training) -> dict[str, float]:
        profiler.recording = training.state.step == PROFILED_STEP
        try:
            return step(training)
        finally:
            profiler.recording = False

    Training.step = profiled_step  # type: ignore[method-assign]
    train(demo.agent, profiler, {"train.deterministic": True})
    return profiler.functions()


class Done(BaseException):
    """Ends the training, of which no step is needed."""


def functions_of_requests() -> set[Function]:
    """The functions between the first request of a group's attempts and its rollouts on the disk."""
    profiler, tools = Profiler(), [tool.schema for tool in demo.agent.tools]
    in_training = False  # before it, the agent is evaluated

    def agent(case: dict[str, Any], base_url: str, api_key: str) -> str:
        def complete(messages: list[dict[str, Any]]) -> dict[str, Any]:
            body = json.dumps({"model": "any", "messages": messages, "tools": tools}).encode()
            headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
            profiler.recording = in_training
            with urllib.request.urlopen(request) as answer:
                message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
            return message

        messages = [{"role": "user", "content": case["input"]}]
        messages.append(complete(messages))
        for call in messages[-1].get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3 in stock"})
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": "Is that all?"})
        return str(complete(messages)["content"])

    def collect_and_store(training: Training) -> dict[str, float]:
        nonlocal in_training
        in_training = True
        groups = training.runner.run(training.source.next(1, training.state.policy_version))
        training.tracker.rollouts(1, groups)
        training.tracker.flush()
        profiler.recording = False
        assert all(len(rollout.model_turns) == 2 for rollout in groups[0].rollouts)
        assert any(message.tool_calls for rollout in groups[0].rollouts for message in rollout.messages)
        raise Done

    Training.step = collect_and_store  # type: ignore[method-assign]
    try:
        train(agent, profiler, {})
    except Done:
        return profiler.functions()
    raise AssertionError("the training took no step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each file with its functions")
    parser.add_argument("--program", action="store_true", help="count what the requests of a program execute instead")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    functions = functions_of_requests() if arguments.program else functions_of_a_step()
    files = Counter(file for file, _, _ in functions)
    if arguments.list:
        for file, count in sorted(files.items()):
            print(f"{file} {count}")
            for _, line, name in sorted(each for each in functions if each[0] == file):
                print(f"    {line:4d} {name}")
    print(f"{SOURCE}: {len(files)} files, {len(functions)} functions")
    if arguments.program:
        others = {file: count for file, count in files.items() if not file.startswith(MODEL_CODE)}
        print(f"without {' '.join(MODEL_CODE)}: {len(others)} files, {sum(others.values())} functions")


if __name__ == "__main__":
    sys.exit(main())
