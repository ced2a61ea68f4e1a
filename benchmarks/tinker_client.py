"""Trainings over Tinker's API with as little as can be on the client's side: sockets, and our own messages.

benchmarks/tinker_server.py starts it. Prints a line of JSON for each round.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from palestra.servers.tinker.messages import Datum, ForwardBackwardRequest, Tensor, write_forward_backward

JSON, PROTOBUF = "application/json", "application/x-protobuf"


class Connection:
    """One HTTP/1.1 connection, kept open between requests."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname or "", urlsplit(url).port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.sent = self.received = 0

    async def post(self, path: str, body: bytes, kind: str = JSON) -> tuple[str, bytes]:
        """The content type and the body of the answer."""
        if self._streams is None or self._streams[0].at_eof():  # a server closes what was long unused
            self._streams = await asyncio.open_connection(self._host, self._port, limit=1 << 26)
        reader, writer = self._streams
        head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: {kind}\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        status, *lines = answer.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        content = await reader.readexactly(int(headers["content-length"]))
        self.sent += len(request)
        self.received += len(answer) + len(content)
        if " 200 " not in status:
            raise RuntimeError(f"{path}: {status}: {content.decode()}")
        return headers["content-type"], content


class Client:
    """Samples and trains the same rows again and again."""

    def __init__(self, url: str, model: str, rows: Sequence[np.ndarray], *, prompt: int, rank: int) -> None:
        self._main, self._each = Connection(url), [Connection(url) for _ in rows]
        self._model_name, self._rows, self._prompt, self._rank = model, rows, prompt, rank
        self._seq = 0

    @property
    def sent(self) -> int:
        return sum(connection.sent for connection in (self._main, *self._each))

    @property
    def received(self) -> int:
        return sum(connection.received for connection in (self._main, *self._each))

    async def start(self) -> None:
        self._session = (await self._ask("create_session", {}))["session_id"]
        lora = {"session_id": self._session, "model_seq_id": 0, "base_model": self._model_name}
        made = await self._ask("create_model", {**lora, "lora_config": {"rank": self._rank}})
        self._model = json.loads(await self._wait(made))["model_id"]

    async def sample(self) -> None:
        """Pin the weights as they are, and sample all rows from them."""
        pinned = {"model_id": self._model, "seq_id": self._next(), "sampling_session_seq_id": self._seq}
        found = await self._wait(await self._ask("save_weights_for_sampler", pinned))
        session = json.loads(found)["sampling_session_id"]
        await asyncio.gather(*(self._one(session, i, row) for i, row in enumerate(self._rows)))

    async def train(self) -> None:
        """Two requests for gradients and a step, sent ahead of their answers as the SDK does."""
        half = len(self._rows) // 2
        promises = [await self._gradients(part, self._next()) for part in (self._rows[:half], self._rows[half:])]
        step = {"model_id": self._model, "seq_id": self._next(), "adam_params": {"learning_rate": 1e-5}}
        promises.append(await self._ask("optim_step", step))
        for promise in promises:
            await self._wait(promise)

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await self.sample()
            await self.train()

    async def _one(self, session: str, number: int, row: np.ndarray) -> None:
        body = {
            "sampling_session_id": session, "seq_id": number, "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": row[: self._prompt].tolist()}]},
            "sampling_params": {"max_tokens": len(row) - 1, "seed": number, "stop": []},
        }  # fmt: skip
        connection = self._each[number]
        await self._wait(await self._ask("asample", body, connection), connection)

    async def _gradients(self, part: Sequence[np.ndarray], seq_id: int) -> Any:
        data = []
        for ids in part:
            size = (len(ids) - 1,)
            constants = {"logprobs": np.full(size, -8.0, np.float32), "advantages": np.full(size, 0.5, np.float32)}
            inputs = {"target_tokens": ids[1:], **constants}
            data.append(Datum(ids[:-1].astype(np.int32), {name: Tensor(v, size) for name, v in inputs.items()}))
        body = write_forward_backward(ForwardBackwardRequest(self._model, seq_id, data, "ppo"))
        return json.loads((await self._main.post("forward_backward", body, PROTOBUF))[1])

    async def _ask(self, path: str, body: Any, connection: Connection | None = None) -> Any:
        return json.loads((await (connection or self._main).post(path, json.dumps(body).encode()))[1])

    async def _wait(self, promise: Any, connection: Connection | None = None) -> bytes:
        while True:
            asked = json.dumps({"request_id": promise["request_id"]}).encode()
            kind, content = await (connection or self._main).post("retrieve_future", asked)
            if JSON not in kind:
                return content
            found = json.loads(content)
            if "error" in found:
                raise RuntimeError(found["error"])
            if found.get("type") != "try_again":
                return content

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def rows(count: int, length: int, vocabulary: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocabulary, length + 1) for _ in range(count)]


async def main() -> None:
    """Warm up; rounds of one client; both clients one after the other, and at once."""
    url, model, *numbers = sys.argv[1:]
    count, length, vocabulary, prompt, rank, repeats = map(int, numbers)
    clients = [Client(url, model, rows(count, length, vocabulary), prompt=prompt, rank=rank) for _ in range(2)]

    def moved() -> tuple[int, int]:
        return sum(client.sent for client in clients), sum(client.received for client in clients)

    async def noted(kind: str, work: Any) -> None:
        before, began = moved(), time.monotonic()
        await work
        ended, after = time.monotonic(), moved()
        row = {"kind": kind, "began": began, "ended": ended, "sent": after[0] - before[0]}
        print(json.dumps({**row, "received": after[1] - before[1]}), flush=True)

    for client in clients:
        await client.start()
        await noted("warm", client.steps(2))  # engines are built, layers compiled and graphs captured
    for _ in range(repeats):
        await noted("sample", clients[0].sample())
        await noted("train", clients[0].train())

    async def apart() -> None:
        for client in clients:
            await client.steps(repeats)

    await noted("apart", apart())
    await noted("together", asyncio.gather(*(client.steps(repeats) for client in clients)))


if __name__ == "__main__":
    asyncio.run(main())
