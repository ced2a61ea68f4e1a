"""The fork server of a Python program: started with the first attempt, ended with the last."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from palestra.core.children import end_group
from palestra.core.errors import RolloutError
from palestra.core.files import scratch_root

_SCRIPT = str(Path(__file__).with_name("fork_server.py"))


class ForkServer:
    """`command` gives the command line of one attempt."""

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
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    async def command(self, start_timeout_s: float) -> list[str]:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start(start_timeout_s)
        return [self._words[0], "-IS", _SCRIPT, "run", self._socket]

    @property
    def _socket(self) -> str:
        return str(Path(self._folder, "socket"))

    async def _start(self, timeout_s: float) -> None:
        Path(self._socket).unlink(missing_ok=True)
        python, *rest = self._words
        self._process = await asyncio.create_subprocess_exec(
            python, _SCRIPT, "serve", self._socket, *rest,
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
