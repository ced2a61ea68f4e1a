"""Child processes: each leads its own process group, and is killed with all that it has started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from palestra.core.errors import SettingError
from palestra.core.secrets import clean_environment

END_WITH_PARENT = "PALESTRA_END_WITH_PARENT"  # set it for an isolated child whose stdin is a pipe of its parent's
CAN_FORK = sys.platform == "linux"
ENDING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_PR_SET_PDEATHSIG = 1
_ISOLATED_CHILD = Path(__file__).with_name("isolated_child.py")


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
    **more: Any,
) -> subprocess.Popen[str]:
    """Start a program with `env`, by default `clean_environment()`. It gets no Ctrl-C of our terminal."""
    visible, pipes = dict(clean_environment() if env is None else env), (stdin, stdout, stderr)
    return subprocess.Popen(command, -1, None, *pipes, env=visible, cwd=cwd, text=True, start_new_session=True, **more)


def split_command(command: str | Sequence[str]) -> list[str]:
    """The words of a command line, or of a list.

    >>> split_command("sh -c 'echo hi'")
    ['sh', '-c', 'echo hi']
    """
    if not isinstance(command, str):
        return [str(word) for word in command]
    try:
        return shlex.split(command)
    except ValueError as error:  # an open quotation
        raise SettingError(f"the command {command!r} has {str(error).lower()}; quote it as for a shell") from error


def isolated(*words: object, python: str | Path = sys.executable) -> list[str]:
    """The command that runs untrusted code so that it cannot inspect other processes; see isolated_child.py."""
    return [str(python), "-P", str(_ISOLATED_CHILD), *map(str, words)]


def end(process: subprocess.Popen[str] | Fork, terminate_s: float = 0.0) -> None:
    """Kill the process and all that it has started; SIGTERM comes `terminate_s` before SIGKILL.

    Call it immediately for a process that has ended by itself, before its pid is reused.
    """
    if terminate_s and not isinstance(process, Fork) and process.poll() is None:
        end_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(terminate_s)
    end_group(process.pid)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of what it has not read
                pipe.close()


def ends_with_parent(number: signal.Signals = signal.SIGTERM) -> Callable[[], None] | None:
    """A `preexec_fn` by which a child gets a signal when this process ends, however it ends; None outside of Linux."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it has ended between the fork and the call
            os._exit(1)

    return prepare


class Fork:
    """A fork of this process that calls a function, leads its own process group and ends with this process. It has
    what `end` uses of a Popen. What other threads hold, and a GPU, cannot be used in it: fork early."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, work: Callable[[], None]) -> None:
        end_with_parent = ends_with_parent(signal.SIGKILL)
        assert end_with_parent is not None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                end_with_parent()
                os.setsid()  # Ctrl-C in a terminal is for its parent
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As a Popen's: its exit status, negative where a signal has ended it."""
        began = time.monotonic()
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if timeout is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > began + (timeout or 0.0):
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            else:
                time.sleep(0.001)
        return self.returncode


def end_group(leader: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process group: a program and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left
        os.killpg(leader, number)
