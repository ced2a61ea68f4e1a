"""The process of an attempt: its output up to a limit, and an end to all that it has started. Optionally forked."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from palestra.core.children import end_group
from palestra.core.errors import RolloutError
from palestra.core.files import scratch_root
from palestra.core.types import ProgramResult

_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_END_S = 10.0  # for a supervisor to end what a program has started


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """How long one attempt may take, how much it may write, and where it runs."""

    timeout_s: float = 300.0
    max_output_bytes: int = 4_000_000
    fork_server: bool = False  # import a Python program's modules once, and fork for each attempt
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
    return [sys.executable, "-IS", _SUPERVISOR, "run", *command]


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


class ForkServer:
    """The fork server of a Python program: started with the first attempt, ended with the last."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        if len(command) < 2 or not re.match(r"python[\d.]*$", Path(command[0]).name) or not command[1].endswith(".py"):
            raise RolloutError(
                f"agent.fork_server is for commands such as `python my_agent.py`, got `{shlex.join(command)}`; "
                "leave it out"
            )
        self._words = list(command)
        self._env = dict(env)
        self._cwd = cwd
        self._folder = tempfile.mkdtemp(prefix="palestra-fork-", dir=scratch_root())
        self._socket = str(Path(self._folder, "socket"))
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def command(self, start_timeout_s: float) -> list[str]:
        """The command line of one attempt."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start(start_timeout_s)
        return [self._words[0], "-IS", _SUPERVISOR, "fork", self._socket]

    async def _start(self, timeout_s: float) -> None:
        Path(self._socket).unlink(missing_ok=True)
        python, *rest = self._words
        self._process = await asyncio.create_subprocess_exec(
            python, _SUPERVISOR, "serve", self._socket, *rest,
            env=self._env, cwd=self._cwd, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while line := await self._process.stdout.readline():  # modules may print while they are imported
                    if line == b"ready\n":
                        return
        await self.close()
        raise RolloutError(
            f"the fork server of `{shlex.join(self._words)}` did not start; try without agent.fork_server"
        )

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_group(process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
