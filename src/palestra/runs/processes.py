"""Processes identified by pid and start time, so that a reused pid is never taken for the old process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from palestra.core.files import open_private
from palestra.core.secrets import redact

RUN_VARIABLE = "PALESTRA_RUN"  # holds the run id in the environment of every process that a run starts
_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.05
_MAX_LINE_BYTES = 1 << 16
_UNFINISHED_LINE_S = 0.2


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its pid and when it was started (boot and clock tick)."""

    pid: int
    born: str

    @property
    def is_alive(self) -> bool:
        return identify(self.pid) == self


def identify(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none or it is a zombie."""
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
    """Where a pid means the same process: the machine and, in containers, the pid namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{os.uname().nodename} {namespace}".strip()


def spawn(command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path) -> tuple[Process, Process]:
    """Start a command in a session of its own; it gets SIGTERM when this process dies. Also returns its log writer.

    Forks, so the caller must have a single thread. `reap` collects the exit status.
    """
    libc, parent = ctypes.CDLL(None), os.getpid()
    reads, output = os.pipe()
    writer = _start_log_writer(reads, output, log, env)
    os.close(reads)
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
    return identify(pid) or Process(pid, "ended at once"), writer


def _start_log_writer(reads: int, output: int, log: Path, env: Mapping[str, str]) -> Process:
    """A process between a command and its log, which only its owner may read. It replaces the secrets that we have,
    and those of the command's environment `env`, such as the token of a run's own servers.

    It ends with the last process that writes, and outlives us: the command must be able to write while it saves.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.close(output)
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(nothing, standard)
            _write_log(reads, log, {**os.environ, **env})
        finally:
            os._exit(0)
    return identify(pid) or Process(pid, "ended at once")


def _write_log(reads: int, log: Path, environ: Mapping[str, str]) -> None:
    """Line by line, so that no secret is cut in two; a line that is not finished waits a moment for its rest."""
    rest = b""
    with open_private(log) as file:
        while True:
            is_ready = bool(select.select([reads], [], [], _UNFINISHED_LINE_S if rest else None)[0])
            chunk = os.read(reads, _MAX_LINE_BYTES) if is_ready else b""
            rest += chunk
            whole = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1 if chunk else len(rest)
            whole = whole if len(rest) <= _MAX_LINE_BYTES else len(rest)
            lines, rest = rest[:whole], rest[whole:]
            with contextlib.suppress(OSError):  # a full disk must not end the run
                text = redact(lines.decode("utf-8", "surrogateescape"), environ)
                file.write(text.encode("utf-8", "surrogateescape"))
            if is_ready and not chunk:
                return


def become_subreaper() -> None:
    """Orphans among our descendants become our children, not init's."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap() -> dict[int, int]:
    """Exit codes of children that have ended, by pid; negative for a signal."""
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
    """Send a signal to a process, and to its process group if it leads one; nothing if it has ended."""
    if process.is_alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)


def end_all(processes: Iterable[Process], terminate_s: float) -> None:
    """SIGTERM to all, then SIGKILL to those that are alive after `terminate_s`."""
    left = list(processes)
    for number, wait_s in ((signal.SIGTERM, terminate_s), (signal.SIGKILL, 5.0)):
        for process in left:
            send(process, number)
        until = time.monotonic() + wait_s
        while (left := [p for p in left if p.is_alive]) and time.monotonic() < until:
            time.sleep(_POLL_S)


def descendants(pid: int) -> list[Process]:
    """All descendants of a process."""
    children: dict[int, list[int]] = {}
    for each in _all_pids():
        if fields := _stat(each):
            children.setdefault(int(fields[1]), []).append(each)
    pids, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        pids += below
    return [process for each in pids if (process := identify(each))]


def processes_of_run(run_id: str) -> list[Process]:
    """All processes that a run has started, directly or not, also those whose parent has died."""
    variable = f"{RUN_VARIABLE}={run_id}".encode()
    found: dict[int, Process] = {}
    for pid in _all_pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if variable in environ and pid != os.getpid() and (process := identify(pid)):
            found |= {p.pid: p for p in (process, *descendants(pid))}
    return list(found.values())


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if _LINUX else []


def _stat(pid: int) -> list[str] | None:
    """/proc/PID/stat from the third field on: state, parent, …; the name before them may hold spaces and brackets."""
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
    command = ["ps", "-o", "state=,lstart=", "-p", str(pid)]
    state, _, born = subprocess.run(command, capture_output=True, text=True).stdout.strip().partition(" ")
    return Process(pid, born.strip()) if state and not state.startswith("Z") else None
