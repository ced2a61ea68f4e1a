"""Train a real model with several settings side by side on one GPU and print what each run learned.

    python benchmarks/real_model.py --model qwen.gguf --agent examples/planner.py --seconds 420 \\
        "scaled: --train.full_update_share 0.25" "full: --train.full_update_share 0"

Each argument is `NAME: OPTIONS of palestra train`. The runs share the GPU, so their times are upper bounds. A run that
is not done after `--seconds` is ended; what its metrics say until then is printed all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

SHOWN = (
    "step reward_mean pass_rate signal_groups update_scale grad_norm kl_sampler entropy tool_calls_mean "
    "other_format_rate tool_error_rate completion_length_mean truncation_rate looping_rate elapsed_seconds"
).split()


def start(spec: str, target: list[str], out: Path) -> tuple[str, subprocess.Popen[bytes]]:
    name, _, options = spec.partition(":")
    command = [sys.executable, "-m", "palestra", "train", *target, "--folder", str(out / name), *shlex.split(options)]
    log = (out / f"{name}.log").open("wb")
    return name, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def table(path: Path, rows: int) -> str:
    """The metrics of about `rows` steps, evenly spaced."""
    steps = [json.loads(line) for line in path.read_text().splitlines() if '"rollouts"' in line]
    every = max(1, len(steps) // rows)
    lines = ["  ".join(name[:10].rjust(10) for name in SHOWN)]
    for row in [*steps[::every], *steps[-1:]]:
        lines.append("  ".join(f"{row[name]:10.4g}" if name in row else " " * 10 for name in SHOWN))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--agent", help="an agent file; or --env")
    parser.add_argument("--env")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs")))
    parser.add_argument("specs", nargs="+")
    args = parser.parse_args()
    target = ([args.agent] if args.agent else ["--env", args.env]) + ["--model.name", args.model]
    args.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.seconds
    running = [start(spec, target, args.out) for spec in args.specs]
    for _, process in running:
        try:
            process.wait(max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    for name, process in running:
        print(f"\n== {name}: exit code {process.returncode}")
        metrics = args.out / name / "metrics.jsonl"
        print(table(metrics, args.rows) if metrics.exists() else "no metrics")
        report = args.out / name / "report.json"
        if report.exists():
            said = json.loads(report.read_text())
            rates = [f"{said[when]['pass_rate']['rate']:.1%}" for when in ("before", "after") if said.get(when)]
            print(" -> ".join(rates), f"in {said['seconds']:.0f} s")
            print(*(finding["sentence"] for finding in said.get("findings", [])), sep="\n")
        else:
            print((args.out / f"{name}.log").read_text(errors="replace")[-1500:])


if __name__ == "__main__":
    main()
