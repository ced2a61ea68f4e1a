"""The state of the trajectory API in one SQLite file. Requests are answered once it is on disk."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from palestra.core.files import write_text

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


def set_facts(db: sqlite3.Connection, **values: Any) -> None:
    rows = [(name, json.dumps(value, default=BaseModel.model_dump)) for name, value in values.items()]
    db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)


def envs(db: sqlite3.Connection) -> list[dict[str, Any]]:
    """The registered environments by id; those of older journals lie in one fact."""
    for env in facts(db).get("envs", []):
        save_env(db, env)
    db.execute("DELETE FROM facts WHERE name = 'envs'")
    return [json.loads(settings) for (settings,) in db.execute("SELECT settings FROM envs ORDER BY id")]


def save_env(db: sqlite3.Connection, env: dict[str, Any]) -> None:
    db.execute("INSERT OR REPLACE INTO envs VALUES (?, ?)", (env["id"], json.dumps(env)))


def add_groups(
    db: sqlite3.Connection, rows: Sequence[tuple[int | None, int, bytes]], key: str | None
) -> list[Queued] | None:
    """Queue (env_id, sequences, body) rows; None when this key was seen before."""
    if key is not None:
        if db.execute("SELECT 1 FROM posts WHERE key = ?", (key,)).fetchone():
            return None
        last = db.execute("INSERT INTO posts (key) VALUES (?)", (key,)).lastrowid
        db.execute("DELETE FROM posts WHERE id <= ?", ((last or 0) - _KEYS_KEPT,))
    insert = "INSERT INTO groups (env_id, sequences, body) VALUES (?, ?, ?)"
    return [Queued(db.execute(insert, row).lastrowid or 0, *row[:2], len(row[2])) for row in rows]


def make_batch(db: sqlite3.Connection, number: int, ids: Sequence[int], step: int) -> list[bytes]:
    """Number the groups of a batch and give their bodies in order."""
    db.executemany("UPDATE groups SET batch = ? WHERE id = ?", [(number, i) for i in ids])
    set_facts(db, step=step, last_batch=number, counted=number, held=number)
    return batch_bodies(db, number)


def batch_bodies(db: sqlite3.Connection, number: int) -> list[bytes]:
    return [body for (body,) in db.execute("SELECT body FROM groups WHERE batch = ? ORDER BY id", (number,))]


def delete_batches(db: sqlite3.Connection, up_to: int) -> None:
    """Delete the groups of batches that the trainer has saved."""
    db.execute("DELETE FROM groups WHERE batch <= ?", (up_to,))


def set_aside(db: sqlite3.Connection, number: int, path: Path) -> None:
    """Move a batch out of the journal, into a file of one group a line."""
    write_text(path, b"".join(body + b"\n" for body in batch_bodies(db, number)).decode())
    db.execute("DELETE FROM groups WHERE batch = ?", (number,))


def queue(db: sqlite3.Connection) -> tuple[list[Queued], list[int], bytes | None]:
    """The waiting groups, the numbers of the batches that are in no checkpoint yet, and the newest group's body."""
    waiting = db.execute("SELECT id, env_id, sequences, length(body) FROM groups WHERE batch IS NULL ORDER BY id")
    unsaved = db.execute("SELECT DISTINCT batch FROM groups WHERE batch IS NOT NULL ORDER BY batch")
    latest = db.execute("SELECT body FROM groups ORDER BY id DESC LIMIT 1").fetchone()
    return [Queued(*row) for row in waiting], [number for (number,) in unsaved], bytes(latest[0]) if latest else None


def clear(db: sqlite3.Connection) -> None:
    for table in ("facts", "groups", "envs", "posts"):
        db.execute(f"DELETE FROM {table}")
