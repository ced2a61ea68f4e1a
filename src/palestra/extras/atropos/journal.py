"""The state of the trajectory API in one SQLite file. Requests are answered once it is on disk."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from palestra.core.files import write_text
from palestra.core.journal import Change

_KEYS_KEPT = 100_000
TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    env_id INTEGER,
    sequences INTEGER NOT NULL,
    batch INTEGER,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_batch ON groups (batch);
CREATE TABLE IF NOT EXISTS envs (id INTEGER PRIMARY KEY, settings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS posts (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Queued:
    """A queued group: its number, its environment, how many sequences it has, and the bytes of its body."""

    id: int
    env_id: int | None
    sequences: int
    size: int = 0


def facts(db: sqlite3.Connection) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in db.execute("SELECT name, value FROM facts")}


def set_facts(**values: Any) -> Change:
    rows = [(name, json.dumps(value, default=BaseModel.model_dump)) for name, value in values.items()]
    return lambda db: db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows).rowcount


def envs(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """The registered environments by id; those of older journals lie in one fact."""
    for env in facts(db).get("envs", []):
        save_env(env)(db)
    db.execute("DELETE FROM facts WHERE name = 'envs'")
    return [json.loads(settings) for (settings,) in db.execute("SELECT settings FROM envs ORDER BY id")]


def save_env(env: dict[str, Any]) -> Change:
    row = env["id"], json.dumps(env)
    return lambda db: db.execute("INSERT OR REPLACE INTO envs VALUES (?, ?)", row).rowcount


def add_groups(rows: Sequence[tuple[int | None, int, bytes]], key: str | None) -> Callable[[Any], list[Queued] | None]:
    """Queue (env_id, sequences, body) rows; None when this key was seen before."""

    def change(db: sqlite3.Connection) -> list[Queued] | None:
        if key is not None:
            if db.execute("SELECT 1 FROM posts WHERE key = ?", (key,)).fetchone():
                return None
            last = db.execute("INSERT INTO posts (key) VALUES (?)", (key,)).lastrowid
            db.execute("DELETE FROM posts WHERE id <= ?", ((last or 0) - _KEYS_KEPT,))
        insert = "INSERT INTO groups (env_id, sequences, body) VALUES (?, ?, ?)"
        return [Queued(db.execute(insert, row).lastrowid or 0, *row[:2], len(row[2])) for row in rows]

    return change


def make_batch(number: int, ids: Sequence[int], step: int) -> Callable[[Any], list[bytes]]:
    """Number the groups of a batch and give their bodies in order."""

    def change(db: sqlite3.Connection) -> list[bytes]:
        db.executemany("UPDATE groups SET batch = ? WHERE id = ?", [(number, i) for i in ids])
        set_facts(step=step, last_batch=number, counted=number, held=number)(db)
        return batch_bodies(number)(db)

    return change


def batch_bodies(number: int) -> Callable[[sqlite3.Connection], list[bytes]]:
    return lambda db: [body for (body,) in db.execute("SELECT body FROM groups WHERE batch = ? ORDER BY id", (number,))]


def delete_batches(up_to: int) -> Change:
    """Delete the groups of batches that the trainer has saved."""
    return lambda db: db.execute("DELETE FROM groups WHERE batch <= ?", (up_to,)).rowcount


def set_aside(number: int, path: Path) -> Change:
    """Move a batch out of the journal, into a file of one group a line."""

    def change(db: sqlite3.Connection) -> None:
        write_text(path, b"".join(body + b"\n" for body in batch_bodies(number)(db)).decode())
        db.execute("DELETE FROM groups WHERE batch = ?", (number,))

    return change


def queue(db: sqlite3.Connection) -> tuple[list[Queued], list[int], bytes | None]:
    """The waiting groups, the numbers of the batches that are in no checkpoint yet, and the newest group's body."""
    waiting = db.execute("SELECT id, env_id, sequences, length(body) FROM groups WHERE batch IS NULL ORDER BY id")
    unsaved = db.execute("SELECT DISTINCT batch FROM groups WHERE batch IS NOT NULL ORDER BY batch")
    latest = db.execute("SELECT body FROM groups ORDER BY id DESC LIMIT 1").fetchone()
    return [Queued(*row) for row in waiting], [number for (number,) in unsaved], bytes(latest[0]) if latest else None


def clear(db: sqlite3.Connection) -> None:
    for table in ("facts", "groups", "envs", "posts"):
        db.execute(f"DELETE FROM {table}")
