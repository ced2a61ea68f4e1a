"""A whole training as a user starts it: where the time of a step goes, and how long the first one takes to come.

    python benchmarks/training.py [--steps 12] [--profile] [-- more options of `palestra train`]
    python benchmarks/training.py --agent examples/planner.py --busy 6 --steps 8 -- --model.name=qwen.gguf

SmolLM2-135M on the calculator, 64 x 8 rollouts a step, defaults otherwise; an agent of a file with `--agent`. The last
line has the medians of a step and its phases, and the largest differences between sampler and learner. `--profile`
prints the functions that took most of the host's time, too.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS = {
    "model.name": "palestra/smollm2",
    "train.problems_per_step": 64,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 96,
    "rollout.max_tool_rounds": 2,
    "env.shots": 2,
    "env.operations": 2,
    "env.held_out_size": 64,
    "checkpoint.every": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--agent", help="an agent's file instead of the calculator")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--busy", type=int, help="the step of which it is told how long the GPU was busy")
    arguments, more = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp()) / "run"
    options = ({} if arguments.agent else SETTINGS) | {"train.max_steps": arguments.steps}
    words = ["train", *([arguments.agent] if arguments.agent else ["--env", "calculator"]), "--folder", str(folder)]
    words += [f"--{name}={value}" for name, value in options.items()] + [word for word in more if word != "--"]
    profile = cProfile.Profile()
    began = time.time()
    note_first_step(began)
    if arguments.profile:
        profile.enable()
    try:
        from palestra.cli.main import run

        if arguments.busy:
            watch_gpu(arguments.busy)
        run(words)
    finally:
        profile.disable()
    report(folder, began)
    if arguments.profile:
        for order in ("cumtime", "tottime"):
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(60)
            print("\n".join(line[:160] for line in text.getvalue().splitlines() if line.strip()))


def report(folder: Path, began: float) -> None:
    from palestra.train.update import SAMPLER_METRICS

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "sample_seconds" in row]
    for row in steps:
        names = ("step", "sampled_tokens", "sample_seconds", "train_seconds", "sample_tokens_per_second", "reward_mean")
        print(json.dumps({name: round(row[name], 4) for name in names if name in row}))
    steady = steps[2:] or steps
    print(
        json.dumps(
            {
                "what": "median of the steps after the second",
                "step_s": round(statistics.median(r["sample_seconds"] + r["train_seconds"] for r in steady), 4),
                "sample_s": round(statistics.median(r["sample_seconds"] for r in steady), 4),
                "train_s": round(statistics.median(r["train_seconds"] for r in steady), 4),
                "tokens_per_s": round(statistics.median(r["sample_tokens_per_second"] for r in steady)),
                "phases_ms": phases_of(steady),
                "largest": {name: max(row.get(name, 0.0) for row in steps) for name in SAMPLER_METRICS},
                "whole_command_s": round(time.time() - began, 1),
            }
        )
    )


def note_first_step(began: float) -> None:
    """Import what a training imports, and print when the first step begins and ends."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from palestra.train.loop import Training

    imported = time.time()
    step, parts = Training.step, time_start()

    def first(training: Training) -> dict[str, float]:
        at, number = time.time(), training.state.step
        metrics = step(training)
        if number > 0:
            return metrics
        times = {"imports": imported - began, "then_until_step_1": at - imported, "step_1": time.time() - at}
        times |= parts  # of the time until step 1; the checks are part of what they check
        print(json.dumps({f"{name}_s": round(seconds, 2) for name, seconds in times.items()}), flush=True)
        return metrics

    Training.step = first  # type: ignore[method-assign]


def time_start() -> dict[str, float]:
    """The seconds of each part of a run's start, filled in as they end."""
    from palestra.engine import engine
    from palestra.learner import forward
    from palestra.train import run, setup

    parts: dict[str, float] = {}

    def timed(name: str, owner: Any, attribute: str) -> None:
        work = getattr(owner, attribute)

        def call(*args: Any, **options: Any) -> Any:
            at = time.time()
            found = work(*args, **options)
            parts[name] = parts.get(name, 0.0) + time.time() - at
            return found

        setattr(owner, attribute, call)

    timed("load", run, "load_for_run")
    timed("engine", setup, "policy_for")
    timed("engine_check", engine, "check_logprobs")
    timed("learner", setup, "LocalLearner")
    timed("learner_check", forward, "choose_mode")
    timed("evaluation", run.Run, "_evaluate")
    return parts


def watch_gpu(number: int) -> None:
    """Print how much of one step the GPU was busy, by its profiler."""
    import torch

    from palestra.train.loop import Training

    step = Training.step

    def watched(training: Training) -> dict[str, float]:
        if training.state.step + 1 != number:
            return step(training)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            began = time.perf_counter()
            metrics = step(training)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        events = profile.key_averages()
        busy = sum(event.self_device_time_total for event in events) / 1e6
        print(json.dumps({"step": number, "seconds": round(seconds, 3), "gpu_busy": round(busy / seconds, 3)}))
        for event in sorted(events, key=lambda e: -e.self_device_time_total)[:25]:
            print(f"{event.self_device_time_total / 1000:9.2f} ms {event.count:6d} x {event.key[:110]}")
        return metrics

    Training.step = watched  # type: ignore[method-assign]


def phases_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median milliseconds of each phase of a step."""
    whole = {"sample_seconds", "train_seconds", "elapsed_seconds"}
    names = {name for row in steps for name in row if name.endswith("_seconds")} - whole
    medians = {n.removesuffix("_seconds"): statistics.median(1000 * row.get(n, 0.0) for row in steps) for n in names}
    return {name: round(value, 1) for name, value in sorted(medians.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    main()
