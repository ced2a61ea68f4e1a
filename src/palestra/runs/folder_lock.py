"""One process trains in a run folder: a lock in the folder itself, independent of the index of runs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from palestra.core.errors import PalestraError, StateError, StorageError
from palestra.core.files import read_regular
from palestra.core.run_folder import RunFolder
from palestra.runs.processes import this_host, this_process

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
