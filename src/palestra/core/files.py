"""Files: atomic writes, folders with a manifest, temporary folders, and users' Python files."""

from __future__ import annotations

import atexit
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from pydantic_core import to_json

from palestra.core.errors import (
    InputError,
    NotFoundError,
    SettingError,
    StateError,
    StorageError,
    UnreadableFileError,
    UserCodeError,
    did_you_mean,
    text_of,
)
from palestra.core.text import encodable

MANIFEST = "manifest.json"  # the last file of a folder to be written: without it the folder is not complete
_TAIL_BYTES = 64 * 1024
_MAX_SAME_NAME = 1000
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EPERM)
MAX_TEXT_BYTES = 64 << 20  # of a file of settings, or of source code


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a crash leaves the old content or the new one, never half of each."""
    _write_lines(path, [encodable(text).encode()])


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path next to `path` to write to; flushed to disk and renamed at the end, deleted after an error."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a link that lay there would be written through
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def open_private(path: Path) -> IO[bytes]:
    """Append to a file, without a buffer, that only its owner may read; so is its folder where it has to be made."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    number = os.open(path, flags, 0o600)
    os.fchmod(number, 0o600)
    return open(number, "ab", buffering=0)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; OSError for others: a pipe may block for ever, a device may have no end."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(f"{path} is not a regular file")
    return open(number, "rb")


def read_regular(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file; OSError for anything else, and for more than `max_bytes`."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"{path} is larger than {max_bytes} bytes")
    return data


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("ab") as file:
        file.writelines(map(_json_line, rows))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a JSON-lines file atomically, one row at a time."""
    _write_lines(path, map(_json_line, rows))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, if it exists; skips lines that do not parse, such as an unfinished last one."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if (row := parse_row(line)) is not None:
                yield row


def filter_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the rows that `keep` refuses, and lines that do not parse, without loading the whole file."""
    if path.is_file():
        with path.open("rb") as file:
            rows = ((line, parse_row(line)) for line in file)
            _write_lines(path, (line.rstrip(b"\n") + b"\n" for line, row in rows if row is not None and keep(row)))


def read_from(path: Path, start: int, most: int = -1) -> tuple[bytes, int]:
    """Up to `most` bytes from a position on, and that position: 0 if the file has been truncated since."""
    try:
        with open_regular(path) as file:
            start = start if start <= file.seek(0, os.SEEK_END) else 0
            file.seek(start)
            return file.read(most), start
    except OSError:
        return b"", start


def last_lines(path: Path, count: int, tail_bytes: int | None = None) -> list[str]:
    """The last lines within the last `tail_bytes` of a file; none where there is no file."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - (tail_bytes or max(_TAIL_BYTES, 400 * count))))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.removesuffix("\n").split("\n")  # not splitlines(): JSON text may hold other line separators
    return lines[-count:] if text and count > 0 else []


def last_rows(path: Path, count: int = 40) -> list[dict[str, Any]]:
    """The last objects of a JSON-lines file, without what was cut."""
    return [row for line in last_lines(path, count) if (row := parse_row(line.encode())) is not None]


def new_folder(parent: Path, name: str, remedy: str = "choose another --output_dir") -> Path:
    """Make an empty folder NAME-TIME in `parent`; a number is added where it exists."""
    name, stamp = slug(name), time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(_MAX_SAME_NAME):
        path = parent / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError(f"cannot make the folder {path} ({error.strerror}); {remedy}") from None
    raise StorageError(f"too many folders named {name} in {parent}; {remedy}")


def slug(name: str) -> str:
    """A name that can be a folder's name.

    >>> slug("my env/v2")
    'my-env-v2'
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def folder_size(folder: Path) -> int:
    """Bytes of all files in it; files that vanish while it counts are left out."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def is_unwritable(error: BaseException | None) -> bool:
    """Whether a file could not be written: the disk is full or read-only, a quota or a limit is reached."""
    return isinstance(error, StorageError) or (isinstance(error, OSError) and error.errno in _UNWRITABLE)


def free_bytes(path: Path) -> int:
    """Free space of the disk that a path is on, or will be on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def cache_folder() -> Path:
    """$PALESTRA_CACHE, or `palestra` in $XDG_CACHE_HOME, or ~/.cache/palestra."""
    if own := os.environ.get("PALESTRA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "palestra"


def _json_line(row: Mapping[str, Any]) -> bytes:
    """A line of compact JSON, in a fifth of the time of json.dumps: a step has hundreds of long rows.

    A row never raises, since others wait to be written: fields that are not JSON are emptied, and named by its error.
    """
    write = partial(to_json, fallback=str, inf_nan_mode="constants")
    try:
        return write(row) + b"\n"
    except Exception:  # a lone surrogate, a cycle, an object whose text cannot be made
        kept, lost = encodable(dict(row)), []
        for key, value in kept.items():
            try:
                write(value)
            except Exception:
                kept[key] = type(value)() if isinstance(value, dict | list) else None
                lost.append(key)
        return write(kept | ({"error": f"{', '.join(lost)} could not be written as JSON"} if lost else {})) + b"\n"


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The object of a line of JSON lines; None for what is none, or was cut."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also a character that was cut in half
        return None
    return row if isinstance(row, dict) else None


def _write_lines(path: Path, lines: Iterable[bytes]) -> None:
    with replacing(path) as partial, partial.open("wb") as file:
        file.writelines(lines)


def write_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Create or replace a folder atomically: `write` fills a temporary one, which is flushed to disk and renamed.

    A manifest with the size and SHA-256 of each file is written last.
    """
    aside = partial_folder(folder)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(p for p in aside.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(aside)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*files, aside / MANIFEST, aside]:
            _flush(path)
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def partial_folder(folder: Path) -> Path:
    """The temporary path at which a folder is written."""
    return folder.with_name(f".{folder.name}.partial")


def verify_folder(folder: Path) -> None:
    """Compare every file with the manifest; PalestraError names the first that is not as it was written."""
    if not (folder / MANIFEST).is_file():
        raise UnreadableFileError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
        expected_files = {str(name): (int(row["bytes"]), str(row["sha256"])) for name, row in manifest.items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UnreadableFileError(f"{folder / MANIFEST} is corrupt") from None
    for name, expected in expected_files.items():
        path = folder / name
        if not path.is_file():
            raise UnreadableFileError(f"the checkpoint {folder} lacks its file {name}")
        if (path.stat().st_size, _digest(path)) != expected:
            raise UnreadableFileError(f"the checkpoint file {path} is corrupt (its checksum differs)")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


try:
    import fcntl
except ImportError:  # Windows, where nothing is locked or removed for others
    fcntl = None  # type: ignore[assignment]

_PREFIX = "palestra-scratch-"
_ATTEMPTS = 100
_making = threading.Lock()


_root: tuple[int, Path] | None = None  # the process that made the folder, and its path


def scratch_root() -> Path:
    """This process's folder for temporary files: `tempfile.TemporaryDirectory(dir=scratch_root())`.

    Temporary folders are removed also after `kill -9`: each process has one folder in TMPDIR, which it locks until it
    ends, and a process that makes its folder removes those of the same user that are not locked.
    """
    global _root
    with _making:
        if _root is None or _root[0] != os.getpid() or not _root[1].is_dir():  # a forked process makes its own
            remove_stale()
            for _ in range(_ATTEMPTS):
                path = Path(tempfile.mkdtemp(prefix=_PREFIX))
                path.chmod(0o711)  # programs that run as another user reach their own folder, and cannot list this one
                # the descriptor stays open, and holds the lock, until the process ends
                if fcntl is None or (_lock(path) is not None and path.is_dir()):  # else taken for a stale one
                    break
            else:
                raise OSError(f"no temporary folder could be made in {tempfile.gettempdir()}")
            _root = os.getpid(), path
            atexit.register(_remove, *_root)
        return _root[1]


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


def _lock(path: Path) -> int | None:
    """Lock a folder of this user; None if another process holds it, or it is no such folder."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(number).st_uid == os.geteuid() and try_lock(number):
        return number
    os.close(number)
    return None


def try_lock(number: int) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock."""
    with suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _remove(pid: int, folder: Path) -> None:
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


_importing: list[str] = []  # files that are being imported, as their users named them


def refuse_in_import(what: str) -> None:
    """Raise if a file that the command line imports starts a training or an evaluation itself."""
    if _importing:
        raise StateError(
            f"{what} is called while {_importing[-1]} is read. "
            'Put the call below `if __name__ == "__main__":`, or run the file with python'
        )


def import_file(path: Path, label: str, expected: str) -> ModuleType:
    """Import a file by its path. `label` is how the user named it; `expected` says what it should define."""
    name = f"palestra_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{label} is not a Python file; give one that ends in .py. {expected}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    _importing.append(label)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # the line of the file itself, even if the error came from code that it called
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        reason = text_of(error)
        if isinstance(error, SyntaxError):
            lines += [error.lineno] if error.filename == str(path) else []
            reason = f"{type(error).__name__}: {error.msg}"
        where = f", line {lines[-1]}" if lines else ""
        raise UserCodeError(f"{label}{where}: {reason}") from error
    finally:
        _importing.pop()
    return module


def import_function(spec: str, option: str) -> Any:
    """The function of `score.py:score`; `option` is what it was given as."""
    path, _, name = spec.rpartition(":")
    file = Path(path)
    if path.endswith(".py") and name and not file.exists():
        raise NotFoundError(f"{option} {spec}: there is no file {path}")
    if not path or not name or not file.is_file():
        raise SettingError(f"{option} {spec}: expected FILE:NAME, a Python file and its function, as score.py:score")
    module = import_file(file, path, f"It should define {name}")
    if not hasattr(module, name):
        raise InputError(f"{option} {spec}: {path} defines no {name!r}.{did_you_mean(name, vars(module))}")
    return getattr(module, name)


def absolute_spec(spec: str) -> str:
    """FILE:NAME with the absolute path of the file, so that it is found from any folder."""
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}" if colon else spec
