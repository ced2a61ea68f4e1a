"""What the host does in a step: agent loop, templates, tools, scores and records, with a sampler that takes no
time. On a GPU this is what keeps it waiting.

    python benchmarks/host.py [--steps 5] [--problems 64] [--group 8] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.chat.template import ChatFormat
from palestra.core.phases import phases
from palestra.core.run_folder import RunFolder
from palestra.core.types import SamplingParams, Turn
from palestra.envs.library.calculator import Calculator, CalculatorConfig
from palestra.envs.running import RunningEnv
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.collect import Collector, token_speakers
from palestra.tracking.jsonl import JsonlTracker

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%d + %d"}}\n</tool_call><|im_end|>'
ANSWER = "The result is %d.<|im_end|>"


class Scripted:
    """A policy whose turns are there at once: a call of the calculator, then an answer."""

    version = 0

    def __init__(self, tokenizer: Any) -> None:
        def ids(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        self._calls = [ids(CALL % (a, b)) for a in range(1, 30) for b in range(1, 30)]
        self._answers = [ids(ANSWER % a) for a in range(100)]

    def open(self, prompt_ids: Sequence[int]) -> Any:
        return Session(list(prompt_ids))

    def fork(self, session: Any, n: int) -> list[Any]:
        return [Session(list(session.token_ids)) for _ in range(n)]

    def append(self, session: Any, token_ids: Sequence[int]) -> None:
        session.token_ids += token_ids

    def close(self, session: Any) -> None: ...

    async def sample(self, session: Any, params: SamplingParams) -> Turn:
        await asyncio.sleep(0)
        turns = self._answers if session.turns else self._calls
        session.turns += 1
        ids = turns[params.seed % len(turns)]
        session.token_ids += ids
        return Turn(
            "model", np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), np.zeros(len(ids), np.int32), "stop"
        )


class Session:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.turns = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    from palestra.models.loading import load_tokenizer

    tokenizer = load_tokenizer("palestra/tiny")
    chat = ChatFormat(tokenizer)
    environment = RunningEnv(Calculator(CalculatorConfig(shots=2, operations=2)))
    sampling = SamplingParams(max_new_tokens=96, temperature=1.0, stop_token_ids=chat.stop_token_ids)
    collector = Collector(
        environment, AttemptLimits(sampling, max_tool_rounds=2), token_speakers(Scripted(tokenizer), chat)
    )
    problems = list(environment.problems("train"))
    folder = RunFolder(Path(tempfile.mkdtemp()))
    tracker = JsonlTracker(folder)
    profile = cProfile.Profile()
    rows = []

    async def step(number: int) -> dict[str, float]:
        drawn = problems[number * options.problems : (number + 1) * options.problems]
        phases.take()
        began = time.perf_counter()
        groups = await collector.collect(drawn, options.group, [f"{number}/{i}" for i in range(len(drawn))])
        took = time.perf_counter() - began
        template = phases.take().get("template", 0.0)
        began = time.perf_counter()
        tracker.rollouts(number + 1, groups)
        return {"agent_loop": took - template, "template": template, "records": time.perf_counter() - began}

    async def run() -> None:
        await step(0)
        if options.profile:
            profile.enable()
        for number in range(1, options.steps + 1):
            rows.append(await step(number))
        profile.disable()

    asyncio.run(run())
    print({name: f"{1e3 * statistics.median(row[name] for row in rows):.0f} ms" for name in rows[0]})
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
