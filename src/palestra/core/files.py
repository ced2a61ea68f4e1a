"""Files on disk: written atomically, JSON lines read as a stream, new folders with unique names, the cache folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pydantic_core import to_json

from palestra.core.errors import PalestraError

_TAIL_BYTES = 64 * 1024
_MAX_SAME_NAME = 1000
MAX_TEXT_BYTES = 64 << 20  # of a file of settings, or of source code


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a crash leaves the old content or the new one, never half of each."""
    _write_lines(path, [text.encode()])


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; flushed to disk and renamed at the end, deleted after an error."""
    partial = path.with_name(f".{path.name}.partial")
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
    """Open a regular file for reading; OSError for anything else.

    Files from elsewhere may be pipes that block for ever, or links to devices without an end.
    """
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
        file.writelines(_json_line(row) for row in rows)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a JSON-lines file atomically, one row at a time."""
    _write_lines(path, (_json_line(row) for row in rows))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time; none where there is no file.

    A line that does not parse is skipped: it is being written, or was when the process was killed.
    """
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
    """Up to `most` bytes from a position on, and that position: 0 where the file was begun anew since."""
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
            raise PalestraError(f"cannot make the folder {path} ({error.strerror}); {remedy}") from None
    raise PalestraError(f"too many folders named {name} in {parent}; {remedy}")


def slug(name: str) -> str:
    """A name that can be a folder's name.

    >>> slug("my env/v2")
    'my-env-v2'
    """
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def folder_size(folder: Path) -> int:
    """Bytes of all files in it; what vanishes meanwhile is not counted."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


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
    """As json.dumps writes it, without spaces, in a fifth of the time: a step has hundreds of long rows."""
    return to_json(row, fallback=str, inf_nan_mode="constants") + b"\n"


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
