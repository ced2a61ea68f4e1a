"""One process trains in a run folder: a lock in the folder itself, whatever the index says or is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.processes import this_host, this_process

_SAFE_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MAX_CHARS = 10_000


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel gives back when the process ends; PalestraError if another holds it."""
    with _open(RunFolder(folder).lock_file, create=True) as file:
        if not _take(file):
            raise _held(folder)
        me = this_process()
        file.seek(0)
        file.truncate(0)
        file.write(json.dumps({"pid": me.pid, "born": me.born, "host": this_host()}))
        file.flush()
        yield


def refuse_held(folder: Path) -> None:
    """PalestraError if another process trains in the folder."""
    if holder(folder) is not None:
        raise _held(folder)


def holder(folder: Path) -> dict[str, Any] | None:
    """pid, born and host of the process that holds the lock; None if nobody does."""
    try:
        with _open(RunFolder(folder).lock_file, create=False) as file:
            return None if _take(file) else dict(json.loads(file.read(_MAX_CHARS) or "{}"))
    except (OSError, ValueError, TypeError, RecursionError, PalestraError):
        return None


def _open(path: Path, *, create: bool) -> IO[str]:
    """Open the lock file, which must be a regular file: a link would be written through, and a FIFO waited for."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0) | _SAFE_FLAGS
    try:
        number = os.open(path, flags, 0o644)
    except OSError as error:
        if not create:
            raise
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise PalestraError(
            f"the run folder cannot be locked: {path} ({reason}); make the folder writable, or delete the file"
        ) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise PalestraError(f"the run folder cannot be locked: {path} is not a regular file; delete it")
    return open(number, "r+", encoding="utf-8")


def _take(file: IO[str]) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _held(folder: Path) -> PalestraError:
    process = holder(folder) or {}
    host = str(process.get("host", "")).partition(" ")[0]
    return PalestraError(
        f"another process (pid {process.get('pid', '?')} on {host or 'this machine'}) trains in {folder}; "
        f"wait for its end, or stop it first: palestra runs stop {shlex.quote(str(folder))}"
    )
