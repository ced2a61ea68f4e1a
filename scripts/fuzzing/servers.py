"""Our servers on loopback ports of this process, a client that sends whatever bytes it is given, and mutated JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fuzzing.check import HANG_S, Tally
from palestra.servers.web import Server, open_port

ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 1e-300, 1e308, 1e39,
    float("nan"), float("inf"), "", " ", "x" * 3000, "\ud800", "\0", "../../etc/passwd", "<|im_end|>", "é\u2028", [],
    {}, [[]], [None], [[1] * 300] * 20, {"a": {"b": [1]}}, "null", "1e400", "true",
]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes


class Errors(logging.Handler):
    """Keeps what is logged as an error: a request may cause none."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record)[-3000:])


@contextmanager
def served(app: Any) -> Iterator[tuple[int, Errors]]:
    """The port of the application while it runs, and what it logs as errors."""
    errors = Errors()
    server, sock = Server(app), open_port("127.0.0.1", 0, None)
    loggers = [logging.getLogger(name) for name in ("", "uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(errors)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield sock.getsockname()[1], errors
    finally:
        server.should_exit = True
        thread.join(15)
        for logger in loggers:
            logger.removeHandler(errors)


def send(port: int, request: bytes) -> Answer | None:
    """Send bytes and wait for the answer; to half a request there is none, so we hang up soon."""
    patience_s = HANG_S if _is_complete(request) else 0.02
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as connection:
        try:
            connection.sendall(request)
            while piece := connection.recv(65536):
                received += piece
        except ConnectionError:  # it answered before it had read everything
            pass
        except TimeoutError:
            if patience_s == HANG_S:
                raise
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    return Answer(int(words[1]), body) if len(words) > 1 and words[1].isdigit() else None


def _is_complete(request: bytes) -> bool:
    """Whether a server has no reason to wait for more, and closes the connection after its answer."""
    head, end, body = request.partition(b"\r\n\r\n")
    sizes = re.findall(rb"\r\nContent-Length: (\d{1,9})(?=\r\n|$)", head)
    return (
        end != b""
        and b"\r\nConnection: close\r\n" in head
        and len(sizes) == 1
        and head.count(b"ontent-") == 2
        and len(body) == int(sizes[0])
    )


def check(tally: Tally, what: str, port: int, request: bytes, errors: Errors) -> Answer | None:
    """One request: an answer below 500, or 503, or none to what is no HTTP; within HANG_S, without an error logged."""
    began = time.monotonic()
    answer = None
    with suppress(TimeoutError):
        answer = send(port, request)
    seconds = time.monotonic() - began
    tally.slowest_s = max(tally.slowest_s, seconds)
    shown = f"{what}: {request[:600]!r}"
    if seconds > HANG_S:
        tally.fault(f"{shown} was not answered within {HANG_S:g} s")
    elif errors.seen:
        tally.fault(f"{shown}\n{errors.seen[0]}")
    elif answer is not None and answer.status >= 500 and answer.status != 503:
        tally.fault(f"{shown} got {answer.status}: {answer.body[:300]!r}")
    else:
        kind = "not answered" if answer is None else "accepted" if answer.status < 400 else "refused"
        tally.outcomes[kind] += 1
    errors.seen.clear()
    return answer


def http(method: str, path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def mutate_json(value: Any, rng: random.Random) -> Any:
    """The value with one or two of its parts replaced, removed, doubled, nested or renamed."""
    copy = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2))):
        copy = _mutate_once(copy, rng)
    return copy


def _mutate_once(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict | list) and value and rng.random() < 0.85:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1 if isinstance(value, dict):
                value[rng.choice(("", "x", key + "s", key.upper()))] = value.pop(key)
            case 2 if isinstance(value, list):
                value.extend(value[: rng.choice((1, 5, 50))])
            case _:
                value[key] = _mutate_once(value[key], rng)
        return value
    if rng.random() < 0.05:
        return _nested(rng.choice((5, 100, 3000)))
    return rng.choice(ODD_VALUES)


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(min(depth, 900)):  # json.dumps has a limit of its own
        value = [value]
    return value


def to_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()
