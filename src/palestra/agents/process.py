"""The process of an attempt: its output up to a limit, and an end to all that it has started."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.core.children import end_group
from palestra.core.types import ProgramResult

_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_END_S = 10.0  # for a supervisor to end what a program has started


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one attempt on time and output, and its isolation."""

    timeout_s: float = 300.0
    max_output_bytes: int = 4_000_000
    # (command, the attempt's folder, working directory) -> the arguments that run the command in isolation
    sandbox: Callable[[Sequence[str], Path, str | None], Sequence[str]] | None = None


class _Running(asyncio.SubprocessProtocol):
    """Collects stdout (1) and stderr (2), up to a limit for both together."""

    def __init__(self, max_output_bytes: int) -> None:
        self.texts = {1: bytearray(), 2: bytearray()}
        self.left = max_output_bytes
        self.ended = asyncio.Event()  # by itself, or at the limit
        self.closed = asyncio.Event()  # the supervisor has ended, and its pipes are read

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


def supervised(command: Sequence[str]) -> list[str]:
    """The command line that runs a command under a supervisor; see supervisor.py."""
    return [sys.executable, "-IS", _SUPERVISOR, *command]


async def run_process(
    command: Sequence[str], env: Mapping[str, str], stdin: Path, cwd: str | None, limits: ProgramLimits
) -> ProgramResult:
    """Run a supervised command to its end, or to the first limit that it meets.

    What it has started ends with it, also when this is cancelled.
    """
    began = time.monotonic()
    with stdin.open("rb") as case:
        running = _Running(limits.max_output_bytes)
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: running, *command, env=dict(env), cwd=cwd, stdin=case, start_new_session=True
        )
    stopped: Literal["time", "output"] | None = None
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended.wait(), limits.timeout_s)
        if transport.get_returncode() is None:
            stopped = "output" if running.left < 0 else "time"
    finally:
        if transport.get_returncode() is None:  # the supervisor ends what the program has started
            transport.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(running.closed.wait(), _END_S)
        except TimeoutError:
            end_group(transport.get_pid())
        transport.close()
    code = transport.get_returncode()
    if stopped or code is None:
        code = -signal.SIGKILL
    return ProgramResult(code, running.text(1), running.text(2), time.monotonic() - began, stopped)
