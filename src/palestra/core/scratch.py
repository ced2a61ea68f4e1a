"""Temporary folders that are removed also after `kill -9`.

Each process has one folder in TMPDIR, which it locks until it ends; its temporary folders are inside. A process that
makes its folder removes those of the same user that are not locked.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked or removed for others
    fcntl = None  # type: ignore[assignment]

_PREFIX = "palestra-scratch-"
_ATTEMPTS = 100
_making = threading.Lock()


@dataclass(frozen=True)
class _Root:
    path: Path
    pid: int
    lock: int  # an open file descriptor of the folder, which holds its lock


_root: _Root | None = None


def scratch_root() -> Path:
    """This process's folder for temporary files: `tempfile.TemporaryDirectory(dir=scratch_root())`."""
    global _root
    with _making:
        if _root is None or _root.pid != os.getpid() or not _root.path.is_dir():  # a forked process makes its own
            remove_stale()
            _root = _make()
            atexit.register(_remove, _root)
        return _root.path


def remove_stale() -> list[Path]:
    """Remove the folders of processes of this user that have ended without removing them. Returns their paths."""
    removed: list[Path] = []
    if fcntl is None:
        return removed
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        number = _lock(path)
        if number is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(number)
            removed.append(path)
    return removed


def _make() -> _Root:
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        path.chmod(0o711)  # programs that run as another user reach their own folder, and cannot list this one
        if fcntl is None:
            return _Root(path, os.getpid(), -1)
        number = _lock(path)
        if number is not None and path.is_dir():  # else another process took it for a stale one
            return _Root(path, os.getpid(), number)
    raise OSError(f"no temporary folder could be made in {tempfile.gettempdir()}")


def _lock(path: Path) -> int | None:
    """Lock a folder of this user; None if another process holds it, or it is no such folder."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(number)
    try:
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number


def _remove(root: _Root) -> None:
    if root.pid == os.getpid():
        shutil.rmtree(root.path, ignore_errors=True)
        with suppress(OSError):
            os.close(root.lock)
