"""Does the same seed give the same run on this machine, also across kill -9 and resume?

    python benchmarks/same_run.py [--env calculator] [--steps 20] [--kill-at 8] [-- options of `palestra train`]

Trains SmolLM2-135M twice with one seed, and with `--kill-at` a third time, killed after that step and resumed from its
last checkpoint. Prints the first step at which metrics (all but times and memory), sampled tokens or the learner's
numbers differ, and whether the trained weights are equal; then what the logs say about memory, of which another amount
divides batches otherwise. `--parallel` runs all of them at the same time on one GPU, which changes the timing:
give each its share with `-- --model.kv_memory_gib=4`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training import SETTINGS

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "calculator": {},
    "reasoning_gym/chain_sum": {
        "env.operations": None,
        "rollout.max_tool_rounds": None,
        "env.shots": 3,
        "env.answer_tags": "false",
        "env.options": json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
        "rollout.max_new_tokens": 12,
    },
}
NOT_COMPARED = ("seconds", "per_s", "per_second", "gib", "time")


def start(folder: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "palestra", "train", "--folder", str(folder), *options]
    return launch(folder, command)


def launch(folder: Path, command: list[str]) -> subprocess.Popen[bytes]:
    log = folder.with_suffix(".log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "rollouts" in row]


def kill_and_resume(folder: Path, options: list[str], at: int) -> None:
    process = start(folder, [*options, f"--checkpoint.every={max(1, at // 2)}"])
    while process.poll() is None and len(steps_of(folder)) < at:
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    launch(folder, [sys.executable, "-m", "palestra", "train", "--resume", str(folder)]).wait()


def differences(first: Path, second: Path) -> Iterator[str]:
    a, b = steps_of(first), steps_of(second)
    if len(a) != len(b):
        yield f"{len(a)} and {len(b)} steps"
    for one, other in zip(a, b, strict=False):
        names = [n for n in one.keys() | other.keys() if one.get(n) != other.get(n) and not n.endswith(NOT_COMPARED)]
        if names:
            values = [f"{n} {one.get(n)} {other.get(n)}" for n in sorted(names)[:12]]
            yield f"metrics differ from step {one['step']}: " + "; ".join(values)
            break
    yield from rollout_differences(first, second)
    files = sorted((first / "tokens").glob("*.npy"))
    apart = [file.name for file in files if file.read_bytes() != (second / "tokens" / file.name).read_bytes()]
    if apart:
        yield f"the learner's numbers of tokens differ in {len(apart)} of {len(files)} steps, first {apart[0]}"
    weights, others = (load_file(next((run / "model").glob("*.safetensors"))) for run in (first, second))
    unequal = [name for name in weights if not torch.equal(weights[name], others[name])]
    if unequal:
        yield f"{len(unequal)} of {len(weights)} trained weights differ"


def rollout_differences(first: Path, second: Path) -> Iterator[str]:
    rows = [[json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()] for run in (first, second)]
    for one, other in zip(*rows, strict=False):
        names = [n for n in one if one[n] != other.get(n) and not n.endswith((*NOT_COMPARED, "id", "tool_results"))]
        if names:
            yield f"rollouts differ from step {one.get('step')}: {names}"
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="calculator", choices=list(ENVIRONMENTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--parallel", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments, more = parser.parse_known_args()
    out = arguments.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    settings = SETTINGS | ENVIRONMENTS[arguments.env] | {"train.max_steps": arguments.steps, "seed": 0}
    options = ["--env", arguments.env, *(f"--{k}={v}" for k, v in settings.items() if v is not None)]
    options += [word for word in more if word != "--"]
    runs = [start(out / "first", options)]
    if not arguments.parallel:
        runs[0].wait()
    runs.append(start(out / "second", options))
    if not arguments.parallel:
        runs[1].wait()
    if arguments.kill_at:
        kill_and_resume(out / "resumed", options, arguments.kill_at)
    for process in runs:
        process.wait()
    for name in ("second", "resumed") if arguments.kill_at else ("second",):
        found = list(differences(out / "first", out / name))
        print(
            f"{arguments.env}, {arguments.steps} steps, first and {name}:", *(found or ["equal to the bit"]), sep="\n  "
        )
    for log in sorted(out.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if "memory" in line and "needs about" not in line:
                print(f"{log.stem}: {line}")


if __name__ == "__main__":
    main()
