"""Processes by identity: a number that another process has got meanwhile is never taken for the one it was."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

MARK = "PALESTRA_RUN"  # in the environment of all that a run starts: by this what it left behind is found
_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process for ever: its number, and when it was born (which boot, which tick)."""

    pid: int
    born: str

    @property
    def is_alive(self) -> bool:
        return identify(self.pid) == self


def identify(pid: int) -> Process | None:
    """The process that has this number now; None where there is none, or only its exit status is left."""
    if not _LINUX:
        return _identify_by_ps(pid)
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else Process(pid, f"{_boot()}/{fields[19]}")


def this_process() -> Process:
    me = identify(os.getpid())
    assert me is not None
    return me


@lru_cache(1)
def this_host() -> str:
    """Where process numbers mean the same: the machine and, in containers, the space of numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{os.uname().nodename} {space}".strip()


def spawn(command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path) -> Process:
    """Start a command in a session of its own; where this process dies, it is asked to end.

    Only for processes of one thread: it forks. Its exit status is for `reap` to fetch.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            if _LINUX:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() == parent:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.chdir(cwd)
                os.execve(command[0], list(command), dict(env))
        except OSError as error:
            os.write(output, f"{command[0]} cannot be started: {error}\n".encode())
        finally:
            os._exit(127)
    os.close(output)
    return identify(pid) or Process(pid, "ended at once")


def adopt_orphans() -> None:
    """From now on, what our descendants leave behind becomes our child, not init's."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap() -> dict[int, int]:
    """Exit codes of children that have ended, by number; minus the signal's number for a killed one."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def send(process: Process, number: signal.Signals) -> None:
    """A signal to a process and its whole group, where it still is the one it was."""
    if process.is_alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)


def end_all(processes: Iterable[Process], patience_s: float) -> None:
    """Ask all to end, wait, then make them."""
    left = list(processes)
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        for process in left:
            send(process, number)
        until = time.monotonic() + wait_s
        while (left := [p for p in left if p.is_alive]) and time.monotonic() < until:
            time.sleep(_POLL_S)


def family(pid: int) -> list[Process]:
    """All descendants of a process."""
    children: dict[int, list[int]] = {}
    for each in _all_pids():
        if fields := _stat(each):
            children.setdefault(int(fields[1]), []).append(each)
    found, look = [], [pid]
    while look:
        below = children.get(look.pop(), [])
        look += below
        found += below
    return [process for each in found if (process := identify(each))]


def marked(run_id: str) -> list[Process]:
    """All processes that a run started, directly or not, wherever they hang in the tree by now."""
    mark = f"{MARK}={run_id}".encode()
    found: dict[int, Process] = {}
    for pid in _all_pids():
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in words and pid != os.getpid() and (process := identify(pid)):
            found |= {p.pid: p for p in (process, *family(pid))}
    return list(found.values())


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if _LINUX else []


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the third field on: state, parent, …; the name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


@lru_cache(1)
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "boot"


def _identify_by_ps(pid: int) -> Process | None:
    words = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    state, _, born = subprocess.run(words, capture_output=True, text=True).stdout.strip().partition(" ")
    return Process(pid, born.strip()) if state and not state.startswith("Z") else None
