"""One run of a program: its own process group, its output up to a limit, and an end to it in any case."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from palestra.core.children import end_group, end_marked
from palestra.core.types import ProgramResult

_LAST_OUTPUT_S = 5.0  # for what is left in the pipes once all processes have ended


class _Running(asyncio.SubprocessProtocol):
    """What a program writes to stdout (1) and stderr (2), up to a limit for both together, and when it ends."""

    def __init__(self, max_output_bytes: int) -> None:
        self.texts = {1: bytearray(), 2: bytearray()}
        self.left = max_output_bytes
        self.ended = asyncio.Event()  # by itself, or at the limit
        self.closed = asyncio.Event()  # nobody is left who could write

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.texts[fd] += data[: max(0, self.left)]
        self.left -= len(data)
        if self.left < 0:
            self.ended.set()

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def text(self, fd: int) -> str:
        return self.texts[fd].decode("utf-8", "replace")


async def run_process(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: Path,
    cwd: str | Path | None,
    timeout_s: float,
    max_output_bytes: int,
    marker: str,
) -> ProgramResult:
    """Run a program to its end, or to the first limit that it meets; what it has started ends with it.

    Also when this is cancelled. `marker` names a variable of `env` whose value no other program has: by it processes
    are found that have left the program's session. A program that cannot be started raises OSError.
    """
    variable = f"{marker}={env[marker]}"
    began = time.monotonic()
    with stdin.open("rb") as case:
        transport, running = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Running(max_output_bytes), *command, env=dict(env), cwd=cwd, stdin=case, start_new_session=True
        )
    stopped: Literal["time", "output"] | None = None
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended.wait(), timeout_s)
        if transport.get_returncode() is None:
            stopped = "output" if running.left < 0 else "time"
        end_group(transport.get_pid())
        await asyncio.to_thread(end_marked, variable)
        with contextlib.suppress(TimeoutError):  # by a grandchild that left the group
            await asyncio.wait_for(running.closed.wait(), _LAST_OUTPUT_S)
        code = transport.get_returncode()
        return ProgramResult(
            -signal.SIGKILL if code is None else code,
            running.text(1),
            running.text(2),
            time.monotonic() - began,
            stopped,
        )
    finally:
        if transport.get_returncode() is None:
            end_group(transport.get_pid())
            end_marked(variable)
        transport.close()
