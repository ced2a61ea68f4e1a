"""Asynchronous rollouts beside synchronous ones: the demo with tools as slow as services of others are.

    python benchmarks/async_rollouts.py [--seeds 3] [--steps 24] [--staleness 2] [--median 0.3] [--sigma 1.0]

Each call of a tool takes a time drawn from a log-normal distribution. For each seed the demo is trained twice, with
`rollout.max_staleness` 0 and k; seconds are those of the steps (evaluations use the same tools without delay).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra import Agent, demo, train_grpo
from palestra.train.watcher import Watcher


class Delay(Watcher):
    """Delays tools during training only; the watcher knows when that is."""

    def __init__(self, median_s: float, sigma: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._mu, self._sigma = math.log(median_s), sigma
        self._is_training = False

    def phase(self, name: str, total: int) -> None:
        self._is_training = name == "training"

    def slow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(**arguments: Any) -> Any:
            if self._is_training:
                await asyncio.sleep(self._rng.lognormvariate(self._mu, self._sigma))
            return function(**arguments)

        return call


def train(seed: int, staleness: int, args: argparse.Namespace) -> dict[str, Any]:
    delay = Delay(args.median, args.sigma, seed)
    tools = [replace(tool, fn=delay.slow(tool.fn)) for tool in demo.agent.tools]
    agent: Agent = replace(demo.agent, tools=tools)
    settings = {"seed": seed, "train.max_steps": args.steps, "rollout.max_staleness": staleness}
    folder = Path(tempfile.mkdtemp()) / "run"
    config = demo.config | settings
    found = train_grpo(agent, demo.suite, config=config, held_out=demo.held_out, watcher=delay, folder=folder)
    steps = [row for row in found.metrics if "sample_seconds" in row]
    return {
        "seed": seed,
        "max_staleness": staleness,
        "seconds": round(sum(row["sample_seconds"] + row["train_seconds"] for row in steps), 1),
        "waited_for_rollouts_s": round(sum(row["sample_seconds"] for row in steps), 1),
        "staleness_seen": max(row.get("staleness_max", 0.0) for row in steps),
        "rollouts": sum(row["rollouts"] for row in steps),
        "before": str(found.before.pass_rate),
        "after": str(found.after.pass_rate),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--median", type=float, default=0.3, help="seconds of a tool call")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm")
    args = parser.parse_args()
    for seed in range(args.seeds):
        pair = [train(seed, staleness, args) for staleness in (0, args.staleness)]
        for row in pair:
            print(json.dumps(row), flush=True)
        print(f"seed {seed}: {pair[1]['seconds'] / pair[0]['seconds']:.2f} of the synchronous time", flush=True)


if __name__ == "__main__":
    main()
