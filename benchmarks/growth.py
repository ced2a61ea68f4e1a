"""Does a long run grow? Memory, open files and threads of a training, sampled from outside while it runs.

    python benchmarks/growth.py [--steps 2000] [-- more options of `palestra train`]

A small run: the demo's agent, 2 x 4 rollouts of at most 48 tokens a step, a checkpoint every 100 steps: about 10
minutes for 2,000 steps on a CPU core, a minute for 300 on an H200, which show the GPU's memory. Ends with status 1
where the last tenth of the steps needs over 3 % more memory than the second tenth, or more files or threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SETTINGS = {
    "train.problems_per_step": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 48,
    "checkpoint.every": 100,
    "train.epochs": 100,
}
ALLOWED_GROWTH = 1.03
GPU = ("GPU MiB held", "GPU MiB taken")


def main() -> int:
    if "--train" in sys.argv[1:2]:
        return train(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two samples")
    arguments, more = parser.parse_known_args()
    work = Path(tempfile.mkdtemp())
    folder, gpu_file = work / "run", work / "gpu.json"
    options = SETTINGS | {"train.max_steps": arguments.steps}
    command = [sys.executable, __file__, "--train", str(gpu_file), "--folder", str(folder), "--json"]
    command += [f"--{name}={value}" for name, value in options.items()] + [word for word in more if word != "--"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
        samples = []
        while run.poll() is None:
            sample = sample_of(run.pid, folder, gpu_file)
            if sample is not None:
                samples.append(sample)
            time.sleep(arguments.every_s)
    if run.returncode:
        raise SystemExit(f"the training ended with status {run.returncode}")
    return report(samples, arguments.steps)


def sample_of(pid: int, folder: Path, gpu_file: Path) -> dict[str, float] | None:
    """One line of the table; None before the first step and after the process has ended."""
    try:
        step = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        files = len(os.listdir(f"/proc/{pid}/fd"))
        memory = int(status["VmRSS"].split()[0]) / 1024
        gpu = json.loads(gpu_file.read_text())
    except (OSError, IndexError, KeyError, ValueError):
        return None
    return {"step": step, "MiB": memory, "files": files, "threads": int(status["Threads"]), **gpu}


def train(gpu_file: Path, options: list[str]) -> int:
    """`palestra train` in this process; after each step, what torch's allocator holds and has taken from the GPU."""
    import torch

    from palestra.cli.main import run
    from palestra.train.loop import Training

    step, cuda = Training.step, torch.cuda.is_available()

    def noted(training: Training) -> dict[str, float]:
        metrics = step(training)
        held = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
        aside = gpu_file.with_suffix(".new")
        aside.write_text(json.dumps({name: size / 2**20 for name, size in zip(GPU, held, strict=True)}))
        aside.replace(gpu_file)
        return metrics

    Training.step = noted  # type: ignore[method-assign]
    return run(["train", *options])


def report(samples: Sequence[dict[str, float]], steps: int) -> int:
    """Medians by tenths of the run; 1 if the last is above the second (in the first, buffers still fill)."""
    names = ["MiB", *GPU, "files", "threads"]
    print("steps", *names, sep="\t")
    rows = []
    for tenth in range(10):
        low, high = tenth * steps // 10, (tenth + 1) * steps // 10
        here = [sample for sample in samples if low < sample["step"] <= high]
        if here:
            rows.append([statistics.median(sample[name] for sample in here) for name in names])
            print(f"{low + 1}-{high}", *(f"{value:.0f}" for value in rows[-1]), sep="\t")
    if len(rows) < 10:
        print(f"too few samples ({len(samples)}): take more steps, or a smaller --every-s")
        return 1
    grown = [name for name, before, after in zip(names, rows[1], rows[-1], strict=True) if exceeds(name, before, after)]
    print(f"grown: {', '.join(grown)}" if grown else "flat")
    return 1 if grown else 0


def exceeds(name: str, before: float, after: float) -> bool:
    return after > before * (ALLOWED_GROWTH if "MiB" in name else 1.0)


if __name__ == "__main__":
    sys.exit(main())
