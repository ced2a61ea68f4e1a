"""A process without our secrets that runs untrusted code and answers requests; see child.py."""

from __future__ import annotations

import io
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from palestra.core import children
from palestra.core.codec import CodecError, decode, encode, exact

_CHILD = Path(__file__).with_name("child.py")
_MAX_REPLY_BYTES = 64 * 2**20


class ChildFailed(Exception):
    """A request without a value: the code raised, took too long or ended the process."""


class ChildTimeout(ChildFailed):
    """A request that took too long."""


class ChildProcess:
    """Starts with the first request, and again after a request that timed out or ended the process.

    For one request at a time.
    """

    def __init__(
        self,
        functions: Path,
        python: str | Path = sys.executable,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        """`functions` is a file of ours that defines what can be asked; it imports nothing of Palestra.

        `stderr` is a file for what the process writes there; its last line is the reason if the process ends.
        """
        self._options = functions, python, env, cwd
        self._stderr = stderr
        self._process: subprocess.Popen[str] | None = None
        self._number = 0

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, function: str, timeout_s: float, **arguments: Any) -> Any:
        """The value that a function returns; ChildFailed with the reason where it returns none."""
        self._number += 1
        try:
            literal = ascii(decode(encode(exact(arguments))))  # of plain values: scalars of numpy have no literal
        except CodecError as error:
            raise ChildFailed(str(error)) from None
        if self._process is None:
            functions, python, env, cwd = self._options
            stderr = subprocess.DEVNULL if self._stderr is None else self._stderr
            command = children.isolated(_CHILD, functions, python=python)
            self._process = children.start(command, env=env, cwd=cwd, stdin=subprocess.PIPE, stderr=stderr)
        process = self._process
        assert isinstance(process.stdin, io.TextIOWrapper)
        assert process.stdout is not None
        try:
            process.stdin.buffer.write(f"{self._number} {function} {literal}\n".encode())
            process.stdin.buffer.flush()
            reply = json.loads(_read_line(process.stdout.fileno(), timeout_s))
            if reply["number"] == self._number:
                if "error" in reply:
                    raise ChildFailed(reply["error"])
                return reply["value"]
            reason = "its process sent a reply to another request"
        except TimeoutError:
            self.close()
            raise ChildTimeout(f"it took longer than {timeout_s:g} s") from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            reason = "its process ended without an answer"
            if self._stderr is not None:
                self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 2000))
                lines = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
                reason = lines[-1] if lines else reason
        self.close()
        raise ChildFailed(reason)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            children.end(process)


def _read_line(handle: int, timeout_s: float) -> bytes:
    """A line of at most 64 MiB; empty where the process has ended."""
    deadline, line = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as ready:
        ready.register(handle, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < _MAX_REPLY_BYTES:
            if not ready.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            if not (chunk := os.read(handle, 1 << 20)):
                return b""
            line += chunk
    return line
