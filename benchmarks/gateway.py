"""Training steps with our own agent loop, and with the same agent as a program behind the gateway.

    python benchmarks/gateway.py [--steps 6] [--problems 8] [--clients 1] [-- --rollout.max_new_tokens=200 …]
    python benchmarks/gateway.py --model palestra/smollm2 --clients 8      # on a GPU, two minutes
    python benchmarks/gateway.py -- --agent.gateway_workers=0              # requests answered by the trainer's process

The agent is the demo's. As a program it is a plain HTTP client without an SDK; `--clients` processes play all attempts
of a step (problems x 8). With the same seeds both sides sample nearly the same tokens. CPU seconds are those of the
trainer's process for whole steps; `tokens_per_s` counts the sampling alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gateway_requests import ClientProcesses

from palestra.agents.programs import Endpoint, ProgramAgent
from palestra.core.types import ProgramResult


@dataclass
class ClientAgent(ProgramAgent):
    """The demo's agent as a program: client processes play its attempts."""

    clients: Any = None

    async def run(self, case: Any, endpoint: Endpoint, limits: Any) -> ProgramResult:
        await self.clients.play(case, endpoint.attempt_id, endpoint.base_url, endpoint.api_key)
        return ProgramResult()

    async def close(self) -> None:
        await self.clients.close()


def train(options: argparse.Namespace, more: list[str]) -> None:
    """Train for some steps and print the means of those after the first two."""
    from palestra import demo, train_grpo
    from palestra.train.loop import Training

    steps: list[dict[str, float]] = []
    whole_step = Training.step

    def timed(training: Training) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        metrics = whole_step(training)
        took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        steps.append({**took, "tokens": metrics["sampled_tokens"], "sample_s": metrics["sample_seconds"]})
        return metrics

    Training.step = timed  # type: ignore[method-assign]
    settings = demo.config | {
        "model.name": options.model,
        "train.max_steps": options.steps,
        "train.problems_per_step": options.problems,
        "checkpoint.every": 0,
    }
    given = dict(word.removeprefix("--").split("=", 1) for word in more if word != "--")
    settings |= {name: value for name, value in given.items() if options.side == "gateway" or "agent." not in name}
    agent: Any = replace(demo.agent, model=options.model)
    if options.side == "gateway":
        agent = ClientAgent(name="shop", model=options.model, clients=ClientProcesses(options.clients))
        settings["agent.max_at_once"] = options.problems * 8
    held_out = demo.make_suite(demo.make_cases(3, held_out=True, seed=2))
    with tempfile.TemporaryDirectory() as folder:
        train_grpo(agent, demo.suite, config=settings, held_out=held_out, progress=False, folder=Path(folder) / "run")
    steady = steps[2:] or steps
    means = {name: fmean(step[name] for step in steady) for name in steady[0]}
    means["tokens_per_s"] = means["tokens"] / means["sample_s"]
    means["cpu_ms_per_token"] = 1000 * means["cpu_s"] / means["tokens"]
    print(json.dumps({"side": options.side, "steps": len(steady)} | {k: round(v, 4) for k, v in means.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--model", default="palestra/tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="processes that play the attempts")
    parser.add_argument("--side", choices=["native", "gateway"], help="only one of the two")
    options, more = parser.parse_known_args()
    if options.side:
        train(options, more)
        return
    found = {}
    for side in ("native", "gateway"):  # in processes of their own, one after the other
        command = [sys.executable, __file__, "--side", side, *sys.argv[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        found[side] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(found[side]), flush=True)
    names = ("tokens_per_s", "cpu_s", "cpu_ms_per_token")
    ratios = {name: round(found["gateway"][name] / found["native"][name], 3) for name in names}
    print(json.dumps({"what": "gateway / native"} | ratios))


if __name__ == "__main__":
    main()
