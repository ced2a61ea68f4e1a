"""What one request costs the gateway itself: CPU microseconds of its process, with a policy that takes no time.

    python benchmarks/gateway_requests.py [--attempts 600] [--clients 1] [--profile]

Attempts of three turns (two tool calls and an answer) of the demo's agent, 64 at a time, by the plain HTTP clients of
benchmarks/gateway.py in processes of their own. About ten seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway import ClientProcesses

from palestra.core.types import Problem, SamplingParams, Turn
from palestra.gateway.gateway import Gateway
from palestra.gateway.shared_prompts import SharedPrompts
from palestra.models.loading import load_tokenizer
from palestra.serve.completer import Completer

TURNS = (
    '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 14}}\n</tool_call><|im_end|>',
    "It is 42.<|im_end|>",
)
SIBLINGS = 8


@dataclass(eq=False)
class Session:
    token_ids: list[int]
    turns: int = 0


@dataclass
class ReadyPolicy:
    """Says what it has to say at once."""

    texts: list[list[int]]
    version: int = 0

    def open(self, prompt_ids: Sequence[int]) -> Session:
        return Session(list(prompt_ids))

    def fork(self, session: Session, n: int) -> list[Session]:
        return [Session(list(session.token_ids)) for _ in range(n)]

    def append(self, session: Session, token_ids: Sequence[int]) -> None:
        session.token_ids += token_ids

    def close(self, session: Session) -> None: ...

    async def sample(self, session: Session, params: SamplingParams) -> Turn:
        ids = self.texts[session.turns]
        session.turns += 1
        session.token_ids += ids
        await asyncio.sleep(0)
        return Turn("model", ids, [-0.5] * len(ids), 0, "stop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options))))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer("palestra/tiny")
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TURNS]
    model = Completer(ReadyPolicy(texts), tokenizer, "ready", 10_000)  # type: ignore[arg-type]
    gateway = Gateway(model, SamplingParams(max_new_tokens=500))
    await gateway.start()
    clients, slots, profile = ClientProcesses(options.clients), asyncio.Semaphore(options.at_once), cProfile.Profile()
    turns = 0

    async def group(number: int) -> None:
        with gateway.shared_prompts(SIBLINGS) as prompts:
            await asyncio.gather(*(attempt(number, i, prompts) for i in range(SIBLINGS)))

    async def attempt(number: int, sibling: int, prompts: SharedPrompts) -> None:
        nonlocal turns
        async with slots:
            problem = Problem(str(number), f"What do {number} lamps cost?")
            opened = gateway.open(problem, seed_key=f"{number}/{sibling}", shared_prompts=prompts)
            await clients.play({"input": problem.input}, opened.id, opened.base_url, opened.api_key)
            rollouts = await opened.finish()
            assert len(rollouts) == 1, rollouts
            turns += opened.counts.turns

    await asyncio.gather(*(group(i) for i in range(8)))
    turns, wall, cpu = 0, time.perf_counter(), time.process_time()
    if options.profile:
        profile.enable()
    await asyncio.gather(*(group(1000 + i) for i in range(options.attempts // SIBLINGS)))
    profile.disable()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await clients.close()
    await gateway.close()
    if options.profile:
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(60)
        pstats.Stats(profile).strip_dirs().sort_stats("cumtime").print_stats(60)
    return {
        "requests": turns,
        "gateway_us_per_request": round(1e6 * cpu / turns),
        "client_us_per_request": round(1e6 * clients.cpu_s / (turns + 24 * SIBLINGS)),
        "requests_per_s": round(turns / wall),
    }


if __name__ == "__main__":
    main()
