"""Steps of one training, with our own agent loop and with the same agent as a program behind the gateway.

    python benchmarks/gateway.py [--steps 6] [--problems 8] [--model palestra/tiny] [-- rollout.max_new_tokens=200 …]

The agent is the demo's. As a program it is a plain HTTP client without an SDK, in a process of its own that plays all
attempts of a step at once (problems x 8); what it costs is told apart. By the same seeds both sides sample much the
same: where the native loop answers a call that cannot be read with an error, the program takes it for an answer.
CPU seconds are those of the trainer's process, whole steps: sampling, scoring, loss, backward, optimizer.
tokens_per_s counts sampling alone. On a GPU (two minutes), where palestra/tiny is so small that a turn costs the host
more than the device, the question is how a model of some size is kept busy:

    python benchmarks/gateway.py --model palestra/smollm2 --clients 8 --steps 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--model", default="palestra/tiny")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="processes that play the attempts")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--side", choices=["native", "gateway", "client"])
    parser.add_argument("settings", nargs="*", help="further settings, name=value")
    options = parser.parse_args()
    if options.side == "client":
        asyncio.run(client())
    elif options.side:
        train(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Both sides in processes of their own, one after the other."""
    found = {}
    for side in ("native", "gateway"):
        command = [sys.executable, __file__, "--side", side, *sys.argv[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        *before, last = done.stdout.strip().splitlines()
        print("\n".join(before) if options.profile else "", end="")
        found[side] = json.loads(last)
        print(json.dumps(found[side]))
    ratio = {name: found["gateway"][name] / found["native"][name] for name in ("cpu_ms_per_token", "tokens_per_s")}
    ratio["cpu_s"] = found["gateway"]["cpu_s"] / found["native"]["cpu_s"]
    print(json.dumps({"what": "gateway / native", **{name: round(value, 3) for name, value in ratio.items()}}))


def train(options: argparse.Namespace) -> None:
    """A training of so many steps; means of those after the first two, which both sides take alike."""
    import cProfile
    import pstats

    from palestra import demo, train_grpo
    from palestra.train.loop import Training

    steps: list[dict[str, float]] = []
    whole_step, profile = Training.step, cProfile.Profile(time.process_time)

    def timed(training: Training) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        if options.profile:
            profile.enable()
        metrics = whole_step(training)
        profile.disable()
        took = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        steps.append({**took, "tokens": metrics["sampled_tokens"], "sample_s": metrics["sample_seconds"]})
        return metrics

    Training.step = timed  # type: ignore[method-assign]
    agent = (
        replace(demo.agent, model=options.model)
        if options.side == "native"
        else client_agent()(name="shop", model=options.model, clients=ClientProcesses(options.clients))
    )
    settings = {
        **demo.config,
        "model.name": options.model,
        "train.max_steps": options.steps,
        "train.problems_per_step": options.problems,
        "checkpoint.every": 0,
        **dict(each.split("=", 1) for each in options.settings),
    }
    if options.side == "gateway":
        settings["agent.max_at_once"] = options.problems * 8
    held_out = demo.make_suite(demo.make_cases(3, held_out=True, seed=2))
    with tempfile.TemporaryDirectory() as folder:
        train_grpo(
            agent, demo.suite, config=settings, held_out=held_out, progress=False, folder=Path(folder) / options.side
        )
    steady = steps[2:] or steps
    tokens, cpu, sampling = (sum(step[name] for step in steady) for name in ("tokens", "cpu_s", "sample_s"))
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    print(
        json.dumps(
            {
                "side": options.side,
                "steps": len(steady),
                "cpu_s": round(statistics.fmean(step["cpu_s"] for step in steady), 4),
                "wall_s": round(statistics.fmean(step["wall_s"] for step in steady), 4),
                "sampled_tokens": round(tokens / len(steady)),
                "cpu_ms_per_token": round(1000 * cpu / tokens, 4),
                "tokens_per_s": round(tokens / sampling),
                "sample_s": round(sampling / len(steady), 4),
                "client_cpu_s": round((0.0 if options.side == "native" else agent.clients.cpu_s) / len(steps), 4),
            }
        )
    )


class ClientProcesses:
    """Processes that play attempts as plain HTTP clients, each many at once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: asyncio.Future[list[Any]] | None = None
        self._readers: list[asyncio.Future[None]] = []
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._played = 0
        self._cpu_s: dict[Any, float] = {}

    @property
    def cpu_s(self) -> float:
        """Of all of them, since they began to play."""
        return sum(self._cpu_s.values())

    async def play(self, case: Any, attempt_id: str, url: str, key: str) -> None:
        if self._processes is None:
            self._processes = asyncio.ensure_future(self._start())
        processes = await self._processes
        done = self._waiting[attempt_id] = asyncio.get_running_loop().create_future()
        attempt = {**case, "id": attempt_id, "url": url, "key": key}
        processes[self._played % self._count].stdin.write(json.dumps(attempt).encode() + b"\n")
        self._played += 1
        await done

    async def close(self) -> None:
        for process in await self._processes if self._processes else ():
            process.stdin.close()
            await process.wait()
        await asyncio.gather(*self._readers)

    async def _start(self) -> list[Any]:
        command = (sys.executable, str(Path(__file__).with_name("gateway.py")), "--side", "client")
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        started = [await asyncio.create_subprocess_exec(*command, **pipes) for _ in range(self._count)]
        for process in started:
            await process.stdout.readline()  # its imports are done
        self._readers = [asyncio.ensure_future(self._read(process)) for process in started]
        return started

    async def _read(self, process: Any) -> None:
        while line := await process.stdout.readline():
            ended = json.loads(line)
            self._cpu_s[process] = ended["cpu_s"]
            if not (done := self._waiting.pop(ended["id"])).done():
                done.set_result(None)


def client_agent() -> type[Any]:
    """The demo's agent as a program: attempts are handed to client processes."""
    from palestra.agents.programs import Endpoint, ProgramAgent
    from palestra.core.types import ProgramResult

    @dataclass
    class ClientAgent(ProgramAgent):
        clients: Any = None

        async def run(self, case: Any, endpoint: Endpoint, limits: Any) -> ProgramResult:
            await self.clients.play(case, endpoint.attempt_id, endpoint.base_url, endpoint.api_key)
            return ProgramResult()

        async def close(self) -> None:
            await self.clients.close()

    return ClientAgent


async def client() -> None:
    """Play the attempts that come by standard input, all at once."""
    from palestra import demo  # noqa: F401  imported before the first attempt comes

    print("ready", flush=True)
    began = time.process_time()
    loop, lines = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    playing = set()
    while line := await lines.readline():
        task = asyncio.ensure_future(play(json.loads(line), began))
        playing.add(task)
        task.add_done_callback(playing.discard)


async def play(attempt: dict[str, Any], began: float) -> None:
    from palestra import demo
    from palestra.core.messages import from_dict
    from palestra.tools.run import run_calls

    tools = {tool.name: tool for tool in demo.agent.tools}
    url = urlsplit(attempt["url"])
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": demo.agent.instructions},
        {"role": "user", "content": attempt["input"]},
    ]
    schemas = [tool.schema for tool in tools.values()]
    for _ in range(6):
        body = json.dumps({"model": "any", "messages": messages, "tools": schemas}).encode()
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {attempt['key']}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        status, answer = await response(reader)
        if status != 200:
            break
        message = answer["choices"][0]["message"]
        messages.append(message)
        calls = from_dict(message).tool_calls
        if not calls or answer["choices"][0]["finish_reason"] == "length":
            break
        results = await run_calls(tools, calls, 30.0, 20_000)
        messages += [{"role": "tool", "tool_call_id": r.call.id, "content": r.content} for r in results]
    writer.close()
    print(json.dumps({"id": attempt["id"], "cpu_s": time.process_time() - began}), flush=True)


async def response(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length:")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))


if __name__ == "__main__":
    main()
