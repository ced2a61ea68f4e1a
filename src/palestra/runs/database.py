"""The SQLite file of the index: its tables, and making it anew from the run folders where it was lost or damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.runs.rebuild import rows_from_folders

_BUSY_S = 30.0

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
                raise PalestraError(
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
        import fcntl  # Windows has none, and runs are not listed there

        home = self.path.parent
        home.mkdir(parents=True, exist_ok=True)
        with (home / "runs.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # SQLite does not wait for a lock when it switches to WAL
            if self.path.exists():
                with _connect(self.path) as db:
                    if _is_whole(db):  # another process was faster
                        return
                for path in home.glob("runs.db*"):
                    path.rename(path.with_name(f"damaged-{path.name}"))
            aside = self.path.with_suffix(".new")
            aside.unlink(missing_ok=True)
            with _connect(aside) as db:
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


def _connect(path: Path | str) -> closing[sqlite3.Connection]:
    return closing(_connected(path))
