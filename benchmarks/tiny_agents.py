"""Train palestra/tiny on ten agents whose tools, arguments and entities are not in its training data.

    python benchmarks/tiny_agents.py [NAME …] [--steps 30] [--seed 0] [--model FOLDER] [--json FILE]

The agents are the files of examples/tiny_agents and benchmarks/tiny_agents; a NAME may also be a path. Prints for each
agent the held-out pass rate before and after, pass@1 and pass@8 before at temperature 1, and the training time.
"""

from __future__ import annotations

import argparse
import json
import runpy
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra import EvalSuite, evaluate, train_grpo

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "examples/tiny_agents", ROOT / "benchmarks/tiny_agents")
SETTINGS = {
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 160,
    "eval.cases": 60,
    "checkpoint.every": 0,
}
SAMPLED_CASES = 32


def files(names: list[str]) -> list[Path]:
    """The files of the agents with these names or paths; all ten without names."""
    known = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.py"))}
    return [known.get(name, Path(name)) for name in names] or list(known.values())


def pass_at(agent: Any, suite: EvalSuite, samples: int) -> tuple[float, float]:
    """Pass@1 and pass@samples at temperature 1 on the first cases."""
    settings = {"rollout.max_new_tokens": 160, "eval.temperature": 1.0, "eval.samples_per_case": samples}
    report = evaluate(agent, suite, config={**settings, "eval.cases": SAMPLED_CASES}, progress=False)
    passes: dict[str, list[bool]] = defaultdict(list)
    for rollout in report.rollouts:
        passes[rollout.problem_id].append(rollout.passed)
    return report.pass_rate.rate, sum(map(any, passes.values())) / len(passes)


def run(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one agent; its row of the table."""
    module = runpy.run_path(str(path))
    agent, suite = module["agent"], module["suite"]
    if arguments.model:
        agent = replace(agent, model=arguments.model)
    pass_1, pass_8 = pass_at(agent, suite, 8)
    steps = {"train.max_steps": arguments.steps, "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        config = {**SETTINGS, **steps, "output_dir": folder}
        result = train_grpo(agent, suite, config=config, progress=False)
        seconds = time.time() - began
        before, after = result.before.pass_rate.rate, result.after.pass_rate.rate
    return {
        "agent": path.stem,
        "pass@1": round(pass_1, 3),
        "pass@8": round(pass_8, 3),
        "before": round(before, 3),
        "after": round(after, 3),
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder instead of palestra/tiny")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'agent':16} {'pass@1':>7} {'pass@8':>7} {'before':>7} {'after':>7} {'seconds':>8}")
    for path in files(arguments.names):
        row = run(path, arguments)
        rows.append(row)
        shares = " ".join(f"{row[name]:7.1%}" for name in ("pass@1", "pass@8", "before", "after"))
        print(f"{row['agent']:16} {shares} {row['seconds']:8}", flush=True)
    gained = sum(row["after"] - row["before"] >= 0.4 for row in rows)
    print(f"{gained} of {len(rows)} gained at least 40 points")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
