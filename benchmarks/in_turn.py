"""Two or more settings of a constant, in turn, step by step in one training: the machine's moods are the same for all.

    python benchmarks/in_turn.py palestra.learner.replicas.PARTS=1,4 [--steps 7] [-- options of `palestra train`]
    python benchmarks/in_turn.py palestra.engine.cuda.runner.CudaRunner.poll_interval=8,4 -- --env calculator …

Prints the medians of each setting's steps, without the first of each. The demo unless told otherwise; with
`--train.learning_rate 1e-9` all steps have about the same work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from pkgutil import resolve_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", help="a constant by its full name, and the numbers that it has in turn")
    parser.add_argument("--steps", type=int, default=7, help="of each")
    options, more = parser.parse_known_args()
    path, values = options.setting.split("=")
    owner, name = path.rsplit(".", 1)
    numbers = [int(value) for value in values.split(",")]

    from palestra.faces.cli.main import run
    from palestra.train.loop import Training

    found: dict[int, list[tuple[float, float, float, float]]] = {number: [] for number in numbers}
    step = Training.step

    def timed(training: Training) -> dict[str, float]:
        number = numbers[training.state.step % len(numbers)]
        setattr(resolve_name(owner), name, number)
        began = time.perf_counter()
        metrics = step(training)
        tokens = 1e6 * metrics["sample_seconds"] / metrics["sampled_tokens"]
        row = (time.perf_counter() - began, metrics["sample_seconds"], metrics["train_seconds"], tokens)
        found[number].append(row)
        return metrics

    Training.step = timed  # type: ignore[method-assign]
    folder = Path(tempfile.mkdtemp()) / "run"
    settings = ["--folder", str(folder), "--train.max_steps", str(options.steps * len(numbers))]
    run(["train", *settings, *(word for word in more if word != "--")])
    for number, rows in found.items():
        step_s, sample_s, train_s, us = (statistics.median(column) for column in zip(*(rows[1:] or rows), strict=True))
        print(
            f"{name}={number}: step {step_s:.3f} s, sampling {sample_s:.3f}, learning {train_s:.3f}, {us:.1f} µs/token"
        )


if __name__ == "__main__":
    main()
