"""What one request costs the gateway itself: CPU microseconds of its process, with a policy that takes no time.

    python benchmarks/gateway_requests.py [--attempts 600] [--clients 1] [--workers 2] [--profile]
    python benchmarks/gateway_requests.py --large 1000000

Attempts of three turns (two tool calls and an answer) of the demo's agent, 64 at a time, by plain HTTP clients in
processes of their own. About ten seconds. With `--workers`, processes answer the requests, and `worker_us_per_request`
is the CPU time of all of them.

With `--large` the longest time for which a request of that many characters keeps the event loop from anything else,
for contexts that refuse it by its length, refuse it by its tokens, and take it. `worst_cpu_ms` counts at most the CPU
time that this process used during a delay, so that other programs on the machine are not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from palestra.core.types import Problem, SamplingParams, Turn
from palestra.models.loading import load_tokenizer
from palestra.policy.base import Policy
from palestra.servers.gateway.conversation_tree import SharedPrompts
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.completer import Completer

TURNS = (
    '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 14}}\n</tool_call><|im_end|>',
    "It is 42.<|im_end|>",
)
SIBLINGS = 8
POST = """
import sys, urllib.error, urllib.request
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]}
try:
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), headers)).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@dataclass(eq=False)
class Session:
    token_ids: list[int]
    turns: int = 0


@dataclass
class ReadyPolicy(Policy[Session]):
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
        command = (sys.executable, __file__, "--play")
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
    from palestra.agents.tools.run import run_calls
    from palestra.core.messages import from_dict

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="processes that answer the requests")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--large", type=int, default=0, help="characters of one request")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        asyncio.run(client())
        return
    if not options.large:
        print(json.dumps(asyncio.run(measure(options))))
    for context in (2048, 100_000, 2 * options.large) if options.large else ():
        print(json.dumps(asyncio.run(measure_delay(options.large, context))), flush=True)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = load_tokenizer("palestra/tiny")
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TURNS]
    model = Completer(ReadyPolicy(texts), tokenizer, "ready", 10_000)  # type: ignore[arg-type]
    gateway = Gateway(model, SamplingParams(max_new_tokens=500), workers=options.workers)
    await gateway.start()
    clients, slots, profile = ClientProcesses(options.clients), asyncio.Semaphore(options.at_once), cProfile.Profile()
    turns = 0

    async def group(number: int) -> None:
        with closing(gateway.shared_prompts(SIBLINGS)) as prompts:
            await asyncio.gather(*(attempt(number, i, prompts) for i in range(SIBLINGS)))

    async def attempt(number: int, sibling: int, prompts: SharedPrompts) -> None:
        nonlocal turns
        async with slots:
            problem = Problem(str(number), f"What do {number} lamps cost?")
            opened = gateway.open(problem, seed_key=f"{number}/{sibling}", shared_prompts=prompts)
            await clients.play({"input": problem.input}, opened.id, opened.base_url, opened.api_key)
            assert len((await opened.finish()).conversations) == 1
            turns += opened.counts.turns

    await asyncio.gather(*(group(i) for i in range(8)))
    workers_cpu = sum(map(cpu_seconds, gateway.workers.process_ids))
    turns, wall, cpu = 0, time.perf_counter(), time.process_time()
    if options.profile:
        profile.enable()
    await asyncio.gather(*(group(1000 + i) for i in range(options.attempts // SIBLINGS)))
    profile.disable()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    workers_cpu = sum(map(cpu_seconds, gateway.workers.process_ids)) - workers_cpu
    await clients.close()
    await gateway.close()
    if options.profile:
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(60)
        pstats.Stats(profile).strip_dirs().sort_stats("cumtime").print_stats(60)
    return {
        "requests": turns,
        "gateway_us_per_request": round(1e6 * cpu / turns),
        "worker_us_per_request": round(1e6 * workers_cpu / turns),
        "client_us_per_request": round(1e6 * clients.cpu_s / (turns + 24 * SIBLINGS)),
        "requests_per_s": round(turns / wall),
    }


def cpu_seconds(process: int) -> float:
    """CPU time of another process (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_delay(characters: int, context: int) -> dict[str, Any]:
    """Send one large request, first as an opening, then as a tool result, while another task counts delays."""
    tokenizer = load_tokenizer("palestra/tiny")
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TURNS]
    gateway = Gateway(
        Completer(ReadyPolicy(texts), tokenizer, "ready", context),  # type: ignore[arg-type]
        SamplingParams(max_new_tokens=500),
    )
    await gateway.start()
    attempt = gateway.open(Problem("0", "large"), seed_key="0")
    url, key = f"{attempt.base_url}/chat/completions", attempt.api_key
    text = ('The quick brown fox: {"jumps": [1, 2]} over it.\n' * (characters // 40))[:characters]
    found: dict[str, Any] = {"characters": characters, "context": context}
    question = {"role": "user", "content": "What do lamps cost?"}
    tools = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
    small = await asyncio.to_thread(_post, url, key, {"messages": [question], "tools": tools})
    reply = small["choices"][0]["message"]
    answered = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": text}
    for kind, messages in (
        ("opening", [{"role": "user", "content": text}]),
        ("tool_result", [question, reply, answered]),
    ):
        worst = worst_cpu = 0.0

        async def watch() -> None:
            nonlocal worst, worst_cpu
            while True:
                began, cpu = time.perf_counter(), time.process_time()
                await asyncio.sleep(0.001)
                delay = time.perf_counter() - began - 0.001
                worst, worst_cpu = max(worst, delay), max(worst_cpu, min(delay, time.process_time() - cpu))

        watcher = asyncio.create_task(watch())
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", POST, url, key, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        status, _ = await process.communicate(json.dumps({"messages": messages, "tools": tools}).encode())
        found[kind] = {
            "status": int(status),
            "seconds": round(time.perf_counter() - began, 2),
            "worst_delay_ms": round(1e3 * worst, 1),
            "worst_cpu_ms": round(1e3 * worst_cpu, 1),
        }
        watcher.cancel()
    await gateway.close()
    return found


def _post(url: str, key: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
