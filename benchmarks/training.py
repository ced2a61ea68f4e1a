"""A whole training as a user starts it: where the time of a step goes, and how long the first one takes to come.

    python benchmarks/training.py [--steps 12] [--profile] [-- more options of `palestra train`]

SmolLM2-135M on the calculator, 64 x 8 rollouts a step, defaults otherwise. `--profile` prints the functions that
took most of the host's time, too.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path

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
    parser.add_argument("--profile", action="store_true")
    arguments, more = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp()) / "run"
    options = SETTINGS | {"train.max_steps": arguments.steps}
    sys.argv = ["palestra", "train", "--env", "calculator", "--folder", str(folder)]
    sys.argv += [f"--{name}={value}" for name, value in options.items()] + [word for word in more if word != "--"]
    profile = cProfile.Profile()
    began = time.time()
    if arguments.profile:
        profile.enable()
    try:
        from palestra.faces.cli.main import main as palestra

        palestra()
    except SystemExit:
        pass
    finally:
        profile.disable()
    report(folder, began)
    if arguments.profile:
        for order in ("cumtime", "tottime"):
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(60)
            print("\n".join(line[:160] for line in text.getvalue().splitlines() if line.strip()))


def report(folder: Path, began: float) -> None:
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
                "whole_command_s": round(time.time() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
