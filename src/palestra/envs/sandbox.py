"""Where code that a model wrote runs: no network, nothing of ours to read, and an end to everything that it uses.

>>> with Sandbox() as sandbox:                                  # doctest: +SKIP
...     sandbox.write("hello.py", "print('hello')")
...     sandbox.run([PYTHON, "hello.py"]).output
'hello\\n'
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

from palestra.core.errors import PalestraError
from palestra.envs.isolation import CLEAN_ENVIRONMENT, PYTHON, Isolation, SandboxLimits, best_isolation, wrap

__all__ = ["PYTHON", "Isolation", "Ran", "Sandbox", "SandboxLimits"]

Stopped = Literal["time", "output", "disk"]

_POLL_S = 0.05
_FLOOD = 100  # a command that writes this many times what is kept of its output is stopped
log = logging.getLogger("palestra")


@dataclass(frozen=True)
class Ran:
    """What a command came to. `output` is stdout and stderr together, cut at the limit; `stopped` says which limit
    ended it, if one did."""

    output: str
    exit_code: int
    seconds: float
    stopped: Stopped | None = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.stopped is None


class Sandbox:
    """A folder of its own and commands that can reach nothing else. One for each rollout."""

    def __init__(self, limits: SandboxLimits | None = None, isolation: Isolation | None = None) -> None:
        self.limits = limits or SandboxLimits()
        self.isolation = isolation or best_isolation()
        self.folder = Path(tempfile.mkdtemp(prefix="palestra-sandbox-"))
        # root is exempt from the limit on processes, so commands get a user of their own, which nobody else is
        self._uid = random.SystemRandom().randrange(2_000_000, 2**31) if os.geteuid() == 0 else None
        self._own(self.folder)
        if self.isolation == "limits":
            log.warning(
                "the sandbox has neither bubblewrap nor namespaces here: code in it has limits on time, memory and "
                "files, but can use the network and read files. Install bubblewrap, or train on tasks that run no code"
            )

    def write(self, name: str, text: str) -> None:
        """Put a file into the sandbox's folder."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        for made in (*(p for p in path.parents if self.folder in p.parents), path):
            self._own(made)

    def read(self, name: str) -> str | None:
        """A file of the sandbox's folder, as far as output is kept; None when there is no such plain file."""
        path = self._path(name)
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return None
            with path.open("rb") as file:
                return file.read(self.limits.output_bytes).decode("utf-8", "replace")
        except OSError:
            return None

    def run(self, command: Sequence[str], stdin: str = "") -> Ran:
        """Run a command in the sandbox's folder to its end, or to the first limit that it meets."""
        began = time.monotonic()
        process = subprocess.Popen(
            wrap(command, self.folder, self.limits, self.isolation, self._uid),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env={**CLEAN_ENVIRONMENT, "HOME": str(self.folder)},
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        kept = _Output(process.stdout, self.limits.output_bytes)
        threading.Thread(target=_feed, args=(process.stdin, stdin), daemon=True).start()
        stopped: Stopped | None = None
        try:
            while stopped is None and not _has_ended(process):
                stopped = self._broken_limit(time.monotonic() - began, kept)
        finally:
            _kill(process)
        kept.finish()
        seconds, exit_code = time.monotonic() - began, process.wait()
        if stopped is None:  # the kernel's own limit on CPU time may have come first
            limit_signals = (signal.SIGKILL, signal.SIGXCPU)  # told as they are, or by the wrapper as 128 + signal
            by_kernel = exit_code in {*(-s for s in limit_signals), *(128 + s for s in limit_signals)}
            stopped = self._broken_limit(seconds if by_kernel else 0.0, kept)
        return Ran(kept.text, exit_code, seconds, stopped)

    def close(self) -> None:
        """Delete the folder, whatever the commands have made of it."""
        for folder, names, _ in os.walk(self.folder):
            for name in names:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _broken_limit(self, seconds: float, output: _Output) -> Stopped | None:
        if seconds > self.limits.seconds:
            return "time"
        if output.size > _FLOOD * self.limits.output_bytes:
            return "output"
        return "disk" if _is_too_full(self.folder, self.limits) else None

    def _path(self, name: str) -> Path:
        """A name inside of the folder, also after following the links that a command may have left there."""
        path = self.folder / name
        parent = path.parent.resolve()
        if Path(name).is_absolute() or not parent.is_relative_to(self.folder.resolve()) or path.name in ("", ".."):
            raise PalestraError(f"{name!r} is outside of the sandbox; give a name relative to its folder")
        return parent / path.name

    def _own(self, path: Path) -> None:
        if self._uid is not None:
            os.chown(path, self._uid, self._uid, follow_symlinks=False)


class _Output:
    """Reads a pipe to its end in a thread, and keeps the beginning."""

    def __init__(self, pipe: IO[bytes], keep: int) -> None:
        self._pipe, self._keep = pipe, keep
        self._kept = bytearray()
        self.size = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while chunk := self._pipe.read1(65536):  # type: ignore[attr-defined]
            self.size += len(chunk)
            self._kept += chunk[: self._keep - len(self._kept)]

    def finish(self) -> None:
        """Wait for the rest; a process that escaped the kill may hold the pipe, so not for ever."""
        self._thread.join(timeout=1.0)

    @property
    def text(self) -> str:
        text = bytes(self._kept).decode("utf-8", "replace")
        return text if self.size <= self._keep else f"{text}\n[… {self.size - self._keep} more bytes]"


def _feed(pipe: IO[bytes], text: str) -> None:
    try:
        with pipe:
            pipe.write(text.encode())
    except OSError:  # the command has ended without reading
        pass


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole group, also what a finished command has left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def _is_too_full(folder: Path, limits: SandboxLimits) -> bool:
    size = count = 0
    for parent, names, files in os.walk(folder):
        count += len(names) + len(files)
        for name in files:
            try:
                size += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
        if size > limits.disk_mib * 2**20 or count > limits.files:
            return True
    return False
