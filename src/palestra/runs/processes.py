"""Processes of a run: identified by pid and start time, started with a redacted log, ended with their descendants.

One process trains in a run folder: it holds a lock in the folder itself, independent of the index of runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from palestra.core import children
from palestra.core.errors import PalestraError, StateError, StorageError
from palestra.core.files import open_private, read_regular
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import redact

RUN_VARIABLE = "PALESTRA_RUN"  # holds the run id in the environment of every process that a run starts
_POLL_S = 0.05
_MAX_LINE_BYTES = 1 << 16
_UNFINISHED_LINE_S = 0.2
_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process by its pid and start time, so that a reused pid is never taken for the old process."""

    pid: int
    born: str  # boot id and clock ticks since boot: changes of the system clock do not affect it

    @property
    def is_alive(self) -> bool:
        return identify(self.pid) == self


def identify(pid: int) -> Process | None:
    """The process that has this pid now; None if there is none or it is a zombie."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            since_boot_s = process.create_time() - psutil.boot_time()
    except psutil.Error:
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    return Process(pid, f"{_boot()}/{round(since_boot_s * ticks_per_s)}")


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


@dataclass(frozen=True, slots=True)
class Part:
    """A process that the supervisor has started, and the thread that writes its log."""

    process: Process
    popen: subprocess.Popen[str]
    log_writer: threading.Thread


def spawn(command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path, locks: Sequence[int] = ()) -> Part:
    """Start a command in its own session, with `locks` (open files); on Linux it gets SIGTERM when this process dies.

    Its output goes to `log`, which only its owner may read, without the secrets in our environment and in `env`.
    """
    reads, output = os.pipe()
    options: dict[str, Any] = {"pass_fds": locks, "preexec_fn": children.ends_with_parent()}
    popen = children.start(command, env=env, cwd=cwd, stdout=output, stderr=output, **options)
    os.close(output)
    arguments = (reads, log, {**os.environ, **env})
    writer = threading.Thread(target=write_log, args=arguments, name=f"log of {popen.pid}", daemon=True)
    writer.start()
    return Part(identify(popen.pid) or Process(popen.pid, "ended at once"), popen, writer)


def write_log(reads: int, log: Path, environ: Mapping[str, str]) -> None:
    """Copy a pipe to a log, line by line, so that no secret is cut in two; an unfinished line waits a moment."""
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
    left = [process for process in processes if process.pid != os.getpid()]
    for number, wait_s in ((signal.SIGTERM, terminate_s), (signal.SIGKILL, _KILL_S)):
        for process in left:
            send(process, number)
        until = time.monotonic() + wait_s
        while (left := [p for p in left if p.is_alive]) and time.monotonic() < until:
            time.sleep(_POLL_S)


def descendants(pid: int) -> list[Process]:
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    return [process for child in below if (process := identify(child.pid))]


def processes_of_run(run_id: str) -> list[Process]:
    """All processes that a run has started, directly or not, also those whose parent has died."""
    processes: set[Process | None] = set()
    for candidate in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if candidate.pid != os.getpid() and candidate.environ().get(RUN_VARIABLE) == run_id:
                processes |= {identify(candidate.pid), *descendants(candidate.pid)}
    return list(filter(None, processes))


@lru_cache(1)
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return "boot"


_MAX_BYTES = 10_000


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder without links, until the process ends at most; PalestraError if another holds it."""
    if link := next((path for path in folder.glob("*") if path.is_symlink()), None):
        raise StorageError(f"{link} is a symbolic link, and a run writes into its own folder only; replace the link")
    path = RunFolder(folder).lock_file
    lock = FileLock(path, timeout=0, mode=0o644, thread_local=False)
    try:
        _require_regular(path)
        lock.acquire()
    except Timeout:
        raise held_error(folder) from None
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(
            f"the run folder cannot be locked: {path} ({reason}); make the folder writable, or delete the file"
        ) from None
    try:
        me = this_process()
        flags = os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags), "w", encoding="utf-8") as file:
            json.dump({"pid": me.pid, "born": me.born, "host": this_host()}, file)
        yield
    finally:
        lock.release()


def holder(folder: Path) -> dict[str, Any] | None:
    """pid, born and host of the process that holds the lock; None if it is free. Creates no file."""
    path = RunFolder(folder).lock_file
    try:
        _require_regular(path)
        if path.exists():
            with FileLock(path, timeout=0, thread_local=False):
                pass
    except Timeout:
        try:
            match json.loads(read_regular(path, _MAX_BYTES)):
                case {"pid": int(pid), "born": str(born), "host": str(host)}:
                    return {"pid": pid, "born": born, "host": host}
        except (OSError, ValueError, RecursionError):
            pass
        return {}
    except OSError:
        pass
    return None


def _require_regular(path: Path) -> None:
    """OSError for anything but a regular file: a link would be written through, and a FIFO waited for."""
    if not path.parent.is_dir():
        raise OSError("there is no such folder")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError("it is not a regular file")


def held_error(folder: Path) -> PalestraError:
    process = holder(folder) or {}
    host = str(process.get("host", "")).partition(" ")[0]
    return StateError(
        f"another process (pid {process.get('pid', '?')} on {host or 'this machine'}) trains in {folder}; "
        f"wait for its end, or stop it first: palestra runs stop {shlex.quote(str(folder))}"
    )
