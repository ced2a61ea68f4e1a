"""An index of a run's rollouts beside its files: SQLite, brought up to date incrementally, with full-text search.

The JSON lines stay the truth: a row knows where its line lies, so that one rollout is one read of the file.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
import zlib
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np

from palestra.core.errors import NotFoundError, StorageError
from palestra.core.files import cache_folder
from palestra.core.run_folder import RunFolder
from palestra.extras.dashboard.rollout_row import columns_of, parse, search_text, shown

_VERSION = 2
_BATCH = 200  # lines of one transaction
_BUSY_S = 30.0
ADVANTAGE = "coalesce(advantage, -1e18)"  # to sort by: those that are not known are the lowest
_SCHEMA = f"""
DROP TABLE IF EXISTS sources;
DROP TABLE IF EXISTS counter;
DROP TABLE IF EXISTS rollouts;
DROP TABLE IF EXISTS texts;
CREATE TABLE sources (kind TEXT PRIMARY KEY, inode INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE TABLE counter (next_id INTEGER NOT NULL);
INSERT INTO counter VALUES (1);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, step INTEGER NOT NULL, group_id INTEGER NOT NULL,
    problem_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, checksum INTEGER NOT NULL,
    token_start INTEGER NOT NULL,
    tokens INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL, turns INTEGER NOT NULL, tool_calls INTEGER NOT NULL,
    tools TEXT NOT NULL, reward REAL NOT NULL, advantage REAL, passed INTEGER NOT NULL, stop TEXT NOT NULL, error TEXT,
    seconds REAL NOT NULL, scores TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, sibling INTEGER NOT NULL,
    group_number INTEGER
);
CREATE INDEX by_step ON rollouts (kind, step, id);
CREATE INDEX by_reward ON rollouts (kind, reward, id);
CREATE INDEX by_advantage ON rollouts (kind, {ADVANTAGE}, id);
CREATE INDEX by_tokens ON rollouts (kind, sampled_tokens, id);
CREATE INDEX by_problem ON rollouts (problem_id, id);
CREATE INDEX by_group ON rollouts (group_id);
CREATE VIRTUAL TABLE texts USING fts5 (text, content='', tokenize="unicode61 tokenchars '_'");
PRAGMA user_version = {_VERSION};
"""


class RolloutIndex:
    """The rollouts of one run. Several processes may read it and bring it up to date."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def source(self, kind: str) -> Path:
        """The file of a kind: "train", "before", "after", or the step of an evaluation."""
        if kind == "train":
            return self.folder.rollouts_file
        if kind in ("before", "after") or kind.isdecimal():
            return self.folder.eval_file(int(kind) if kind.isdecimal() else kind)  # type: ignore[arg-type]
        raise NotFoundError(f"there are no rollouts of the kind {kind[:40]!r}; expected train, before, after or a step")

    def kinds(self) -> list[str]:
        train = ["train"] if self.folder.rollouts_file.is_file() else []
        return train + [str(name) for name in self.folder.eval_names()]

    def open(self) -> closing[sqlite3.Connection]:
        """A connection for one use."""
        name = hashlib.blake2b(str(self.folder.path).encode(), digest_size=12).hexdigest()
        for path in (self.folder.dashboard_index, cache_folder() / "dashboard" / f"{name}.db"):
            try:
                return closing(_connect(path))
            except (sqlite3.OperationalError, OSError):  # a folder that may not be written to
                continue
            except sqlite3.DatabaseError:  # damaged: all that is in it is in the files, too
                path.unlink(missing_ok=True)
                return closing(_connect(path))
        raise StorageError(f"no index can be written to {self.folder.path} or {cache_folder()}; free some space")

    def update(self, kinds: list[str] | None = None, *, within_s: float | None = None) -> float:
        """Index new lines for at most `within_s`; return the share of bytes that are indexed (1.0: all)."""
        until = None if within_s is None else time.monotonic() + within_s
        done = total = 0
        with self.open() as db:
            for kind in kinds or self.kinds():
                path = self.source(kind)
                if not path.is_file():
                    continue
                position = _source(db, kind)[1]
                with path.open("rb") as file:  # only read: a transaction would wait for the disk
                    ended = os.fstat(file.fileno()).st_size == position and _is_unchanged(db, kind, file)
                while not ended and (until is None or time.monotonic() < until):
                    position, ended = self._batch(db, kind, path)
                done += position  # a line that is being written counts when it is whole
                total += position if ended else max(position, path.stat().st_size)
        return 1.0 if done >= total else done / total

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        """All rows of a kind, oldest first."""
        self.update([kind])
        return [shown(row) for row in self.query("SELECT * FROM rollouts WHERE kind = ? ORDER BY id", kind)]

    def query(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """All rows of one query."""
        with self.open() as db:
            return db.execute(sql, values).fetchall()

    def row(self, rollout_id: int) -> sqlite3.Row:
        rows = self.query("SELECT * FROM rollouts WHERE id = ?", rollout_id)
        if not rows:
            raise UnknownRollout(f"there is no rollout {rollout_id} in this run")
        return rows[0]

    def record(self, row: sqlite3.Row) -> dict[str, Any]:
        """The whole rollout, by one read of its line."""
        try:
            with self.source(row["kind"]).open("rb") as file:
                line = _read(file, row)
        except OSError:
            line = b""
        record = parse(line) if zlib.crc32(line) == row["checksum"] else None
        if record is None:
            raise UnknownRollout(f"the line of rollout {row['id']} has changed; reload the page")
        return record

    def _batch(self, db: sqlite3.Connection, kind: str, path: Path) -> tuple[int, bool]:
        """Index some lines; gives the position after them, and whether these were the last."""
        with db, path.open("rb") as file:  # one transaction
            db.execute("BEGIN IMMEDIATE")
            position = _checked_position(db, kind, file)
            file.seek(position)
            position, ended = self._add_lines(db, kind, file, position)
            db.execute("INSERT OR REPLACE INTO sources VALUES (?, ?, ?)", (kind, path.stat().st_ino, position))
        return position, ended

    def _add_lines(self, db: sqlite3.Connection, kind: str, file: IO[bytes], position: int) -> tuple[int, bool]:
        previous: Any = _last_row(db, kind)
        (next_id,) = db.execute("SELECT next_id FROM counter").fetchone()
        rows: list[dict[str, Any]] = []
        texts: list[tuple[int, str]] = []
        ended, table_step, table = True, None, None
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                break
            if (record := parse(line)) is not None:  # other lines are not shown, and hide no other one
                row, step = columns_of(record), record.get("step")
                if not isinstance(step, int | float):
                    step = kind if kind.isdecimal() else 0
                row |= {"id": next_id, "kind": kind, "step": int(step), "start": position}
                row |= {"length": len(line), "checksum": zlib.crc32(line), **_place(row, record, previous)}
                if kind == "train" and table_step != row["step"]:
                    table_step, table = row["step"], token_table(self.folder, row["step"])
                row["advantage"] = None if table is None else _advantage(table, row, record)
                rows.append(row)
                texts.append((next_id, search_text(record)))
                previous, next_id = row, next_id + 1
            position += len(line)
            if len(rows) >= _BATCH:
                ended = False
                break
        if rows:
            values = ", ".join(f":{name}" for name in rows[0])
            db.executemany(f"INSERT INTO rollouts ({', '.join(rows[0])}) VALUES ({values})", rows)
        db.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
        db.execute("UPDATE counter SET next_id = ?", (next_id,))
        if kind == "train":
            # where the run did not say: the reward less the mean of the group
            for group in {row["group_id"] for row in rows if row["advantage"] is None}:
                db.execute(
                    "UPDATE rollouts SET advantage = reward - "
                    "(SELECT avg(reward) FROM rollouts WHERE group_id = :group) "
                    "WHERE group_id = :group AND error IS NULL",
                    {"group": group},
                )
        return position, ended


class UnknownRollout(NotFoundError):
    """There is no rollout of this id."""


def _connect(path: Path) -> sqlite3.Connection:
    if path.is_symlink():  # it may lead to any database of the user
        raise OSError(f"{path} is a symbolic link")
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    db.row_factory = sqlite3.Row
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != _VERSION:
            db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                (version,) = db.execute("PRAGMA user_version").fetchone()  # another process may have been faster
                for statement in _SCHEMA.split(";\n") if version != _VERSION else ():
                    db.execute(statement)
        db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db


def _is_unchanged(db: sqlite3.Connection, kind: str, file: IO[bytes]) -> bool:
    """Whether the indexed lines are still where they were."""
    (inode, position), stat, last = _source(db, kind), os.fstat(file.fileno()), _last_row(db, kind)
    same = stat.st_ino == inode and stat.st_size >= position
    return same and (last is None or zlib.crc32(_read(file, last)) == last["checksum"])


def _checked_position(db: sqlite3.Connection, kind: str, file: IO[bytes]) -> int:
    """Where new lines begin. Lines that are no longer where they were (a resumed run drops the records of steps that
    it does again) are forgotten; those before them stay."""
    if _is_unchanged(db, kind, file):
        return _source(db, kind)[1]
    ids = [row[0] for row in db.execute("SELECT id FROM rollouts WHERE kind = ? ORDER BY id", (kind,))]
    low, high = 0, len(ids)  # the first `low` are there, those from `high` on are not
    while low < high:
        middle = (low + high) // 2
        row = db.execute("SELECT * FROM rollouts WHERE id = ?", (ids[middle],)).fetchone()
        low, high = (middle + 1, high) if zlib.crc32(_read(file, row)) == row["checksum"] else (low, middle)
    db.execute("DELETE FROM rollouts WHERE kind = ? AND id > ?", (kind, ids[low - 1] if low else -1))
    if not low:
        return 0
    row = db.execute("SELECT * FROM rollouts WHERE id = ?", (ids[low - 1],)).fetchone()
    return int(row["start"] + row["length"])


def _last_row(db: sqlite3.Connection, kind: str) -> sqlite3.Row | None:
    """The newest row of a kind. `+`: by the id backwards, not by an index of the kind, which it would sort."""
    row: sqlite3.Row | None = db.execute(
        "SELECT * FROM rollouts WHERE +kind = ? ORDER BY id DESC LIMIT 1", (kind,)
    ).fetchone()
    return row


def _source(db: sqlite3.Connection, kind: str) -> tuple[int, int]:
    """The file's inode, and how much of it is indexed."""
    row = db.execute("SELECT inode, position FROM sources WHERE kind = ?", (kind,)).fetchone()
    return (row["inode"], row["position"]) if row else (0, 0)


def _read(file: IO[bytes], row: sqlite3.Row) -> bytes:
    file.seek(row["start"])
    return file.read(row["length"])


def _place(row: dict[str, Any], record: dict[str, Any], previous: Any) -> dict[str, Any]:
    """The number of its group, its place in the group, and where its tokens begin among those of its step.

    A group's rollouts lie one after the other; newer files number the groups of a step.
    """
    first = {"group_id": row["id"], "sibling": 0, "token_start": 0, "group_number": record.get("group")}
    if previous is None or previous["step"] != row["step"]:
        return first
    place = first | {"token_start": previous["token_start"] + previous["tokens"]}
    numbers = (previous["group_number"], record.get("group"))
    if previous["problem_id"] != row["problem_id"] or not (None in numbers or numbers[0] == numbers[1]):
        return place
    return place | {"group_id": previous["group_id"], "sibling": previous["sibling"] + 1}


def _advantage(table: Any, row: dict[str, Any], record: dict[str, Any]) -> float | None:
    """The advantage of its first sampled token, by the token file of its step; None if unknown."""
    first = 0
    for turn in record.get("turns") or ():
        if turn.get("maker") == "model" and turn.get("token_ids"):
            if row["token_start"] + row["tokens"] > len(table):
                return None
            value = float(table[row["token_start"] + first]["advantage"])
            return None if np.isnan(value) else value
        first += len(turn.get("token_ids") or ())
    return None


def token_table(folder: RunFolder, step: int) -> Any:
    """The token file of a step, memory-mapped; None if there is none."""
    try:
        return np.load(folder.tokens_file(step), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
