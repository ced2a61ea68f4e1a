"""Count the files and functions of palestra that one step of a small CPU training executes.

    python scripts/step_calls.py                                  # this checkout
    PYTHONPATH=<checkout>/src python scripts/step_calls.py        # another one
    python scripts/step_calls.py --list                           # also each file with its functions

It trains the embedded model on the demo agent for two steps of 4 problems x 4 attempts, and profiles the second step
in all threads of this process. Lambdas and comprehensions count as functions.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import logging
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import palestra
from palestra import demo, train_grpo
from palestra.train.loop import Training

SETTINGS = {
    "seed": 0,
    "train.max_steps": 2,
    "train.problems_per_step": 4,
    "train.deterministic": True,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 60,
    "eval.cases": 4,
    "eval.every": 0,
    "checkpoint.every": 0,
}
SOURCE = str(Path(palestra.__file__).parent) + os.sep
PROFILED_STEP = 1


def functions_of_a_step() -> set[tuple[str, int, str]]:
    """File, first line and name of each function below src/palestra that the second step executes."""
    codes: set[CodeType] = set()
    recording = False
    step = Training.step

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if recording and event == "call":
            codes.add(frame.f_code)

    def profiled_step(training: Training) -> dict[str, float]:
        nonlocal recording
        recording = training.state.step == PROFILED_STEP
        try:
            return step(training)
        finally:
            recording = False

    Training.step = profiled_step  # type: ignore[method-assign]
    threading.setprofile(profile)  # before any thread starts
    sys.setprofile(profile)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = {**demo.config, **SETTINGS, "output_dir": folder}
            train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out, progress=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    here = {code for code in codes if code.co_filename.startswith(SOURCE)}
    return {(code.co_filename.removeprefix(SOURCE), code.co_firstlineno, code.co_qualname) for code in here}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each file with its functions")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    functions = functions_of_a_step()
    files = Counter(file for file, _, _ in functions)
    if arguments.list:
        for file, count in sorted(files.items()):
            print(f"{file} {count}")
            for _, line, name in sorted(each for each in functions if each[0] == file):
                print(f"    {line:4d} {name}")
    print(f"{SOURCE}: {len(files)} files, {len(functions)} functions")


if __name__ == "__main__":
    sys.exit(main())
