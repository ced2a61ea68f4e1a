"""The SQLite file of the index: its tables, and how it is rebuilt from the run folders if it was lost or damaged.

Each folder knows its run (index.json); folders.txt in the home lists the folders.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from palestra.core.errors import PalestraError, StorageError
from palestra.core.files import read_regular, write_json
from palestra.core.run_folder import RunFolder
from palestra.runs.folder_lock import holder
from palestra.runs.processes import this_host

_BUSY_S = 30.0
REBUILT = "the index of runs was lost; this was read from the run folder"
_KEPT = ("run_id", "name", "environment", "kind", "created", "gpus", "memory_gib")
_RUN_ID = re.compile(r"[a-z0-9]{1,64}")
_FOLDERS = "folders.txt"  # one path a line, of every run that was ever added

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    environment TEXT NOT NULL,
    folder TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    reason TEXT,
    created REAL NOT NULL,
    started REAL,
    ended REAL,
    launched REAL NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER,
    born TEXT,
    heartbeat REAL,
    gpus INTEGER NOT NULL DEFAULT 0,
    memory_gib REAL NOT NULL DEFAULT 0,
    max_runs INTEGER
);
CREATE TABLE IF NOT EXISTS processes (
    run_id TEXT NOT NULL, part TEXT NOT NULL, pid INTEGER NOT NULL, born TEXT NOT NULL, exit_code INTEGER,
    PRIMARY KEY (run_id, part)
);
CREATE TABLE IF NOT EXISTS ports (port INTEGER PRIMARY KEY, run_id TEXT NOT NULL, part TEXT NOT NULL);
"""


class Database:
    """A file that many processes open; with `writes=False` it is only read, or made in memory where it is missing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes
        if writes:
            try:
                self._connection().close()
            except (OSError, sqlite3.Error) as error:
                raise StorageError(
                    f"the index of runs {path} cannot be opened ({error}); "
                    "set PALESTRA_HOME to a folder that you may write to"
                ) from None

    @contextmanager
    def open(self) -> Iterator[sqlite3.Connection]:
        """For reading."""
        with closing(self._connection()) as db:
            yield db

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """One transaction, taken back where it raises."""
        with self.open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    def _connection(self) -> sqlite3.Connection:
        """A connection for one use: none is carried through a fork or into another thread."""
        for _ in range(2):
            if self.path.exists():
                db = _connected(self.path)
                if _is_whole(db):
                    return db
                db.close()
            if not self._writes:
                db = _connected(":memory:")
                _fill(db, self.path.parent)
                return db
            self._make()
        raise sqlite3.DatabaseError("it is damaged, and was damaged again as soon as it was made anew")

    def _make(self) -> None:
        """Make it, with the runs of the folders; what was there before is damaged, and kept under another name.

        Made aside and renamed, so that the file has its tables from the moment at which it exists.
        """
        home = self.path.parent
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "runs.lock"):  # SQLite does not wait for a lock when it switches to WAL
            if self.path.exists():
                with closing(_connected(self.path)) as db:
                    if _is_whole(db):  # another process was faster
                        return
                for path in home.glob("runs.db*"):
                    path.rename(path.with_name(f"damaged-{path.name}"))
            aside = self.path.with_suffix(".new")
            aside.unlink(missing_ok=True)
            with closing(_connected(aside)) as db:
                db.execute("PRAGMA journal_mode=WAL")
                _fill(db, home)
            aside.rename(self.path)


def insert(db: sqlite3.Connection, values: Mapping[str, Any]) -> None:
    """A row of the table `runs`."""
    names = ", ".join(values)
    db.execute(f"INSERT INTO runs ({names}) VALUES ({', '.join('?' * len(values))})", list(values.values()))


def _fill(db: sqlite3.Connection, home: Path) -> None:
    """The tables, with the runs whose folders are known."""
    db.executescript(_SCHEMA)
    for values in rows_from_folders(home):
        insert(db, values)


def _is_whole(db: sqlite3.Connection) -> bool:
    """Whether all tables are there and can be read."""
    try:
        for table in ("runs", "processes", "ports"):
            db.execute(f"SELECT count(*) FROM {table}").fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):  # it is locked, or cannot be opened
            raise
        return False
    except sqlite3.DatabaseError:
        return False
    return True


def _connected(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    with suppress(sqlite3.DatabaseError):  # it is damaged, which is found out next
        db.execute("PRAGMA synchronous=NORMAL")
    return db


def remember(home: Path, row: Mapping[str, Any]) -> None:
    """Note a new run, so that `rows_from_folders` finds it."""
    with suppress(OSError):
        write_json(RunFolder(Path(row["folder"])).index_file, {name: row[name] for name in _KEPT if name in row})
        with (home / _FOLDERS).open("a", encoding="utf-8") as file:
            file.write(f"{row['folder']}\n")


def rows_from_folders(home: Path) -> Iterator[dict[str, Any]]:
    """A row for each run folder that is known and still there, the oldest first."""
    rows: dict[str, dict[str, Any]] = {}
    file = home / _FOLDERS
    listed = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for path in dict.fromkeys([*map(Path, listed), *sorted((home / "runs").glob("*"))]):
        with suppress(OSError, ValueError, PalestraError, KeyError):
            row = row_from_folder(RunFolder(path))
            rows.setdefault(row["run_id"], row)
    yield from sorted(rows.values(), key=lambda row: row["created"])


def row_from_folder(folder: RunFolder) -> dict[str, Any]:
    """What the folder itself says of its run."""
    known = _known(folder)
    record = folder.record if folder.has_begun else json.loads(folder.request_file.read_text())
    process = holder(folder.path)
    files = [path for path in (folder.metrics_file, folder.config_file, folder.path) if path.exists()]
    changed = files[0].stat().st_mtime
    created = known.get("created") or _time_of(record.get("created")) or files[-1].stat().st_mtime
    row = {
        "run_id": id_of(folder.path), "name": str(record.get("name") or folder.path.name), "environment": "",
        "folder": str(folder.path), "kind": "foreground", "reason": REBUILT, "created": created,
        "launched": created, "started": created, "host": this_host(),
    }  # fmt: skip
    row |= known
    if process is None:
        return row | {"state": "completed" if folder.model.is_dir() else "stopped", "ended": changed}
    # its supervisor, if it has one, says so with its next heartbeat
    return row | process | {"state": "running", "kind": "foreground"}


def _known(folder: RunFolder) -> dict[str, Any]:
    """The valid values of index.json; the file may come from somebody else."""
    try:
        values = json.loads(read_regular(folder.index_file)) if folder.index_file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: values[name] for name in _KEPT if _is_valid(name, values.get(name))} if type(values) is dict else {}


def _is_valid(name: str, value: Any) -> bool:
    match name:
        case "run_id":
            return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None
        case "name" | "environment":
            return isinstance(value, str)
        case "kind":
            return value in ("managed", "foreground")
        case "gpus":
            return type(value) is int and 0 <= value < 2**31
    return type(value) in (int, float) and abs(value) < 2**53 and math.isfinite(value)


def _time_of(stamp: Any) -> float | None:
    """Seconds since the epoch, of a run.json's own time."""
    try:
        return time.mktime(time.strptime(str(stamp), "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return None


def id_of(folder: Path) -> str:
    """An id from the folder's path, always the same: for folders without an id, or with one of another folder."""
    return hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()
