"""One process trains in a run folder: a lock in the folder itself, whatever the index says or is lost."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.processes import this_host, this_process


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel gives back when the process ends; PalestraError if another holds it."""
    with RunFolder(folder).lock_file.open("a+", encoding="utf-8") as file:
        if not _take(file):
            raise _held(folder)
        me = this_process()
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
        with RunFolder(folder).lock_file.open("r+", encoding="utf-8") as file:
            return None if _take(file) else dict(json.loads(file.read() or "{}"))
    except (OSError, ValueError):
        return None


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
