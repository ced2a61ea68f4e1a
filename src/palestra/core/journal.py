"""A journal in one SQLite file: what was changed is on disk once the change returns. One process at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from palestra.core.errors import StorageError

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], Any]


class Journal:
    """One thread writes; the changes that wait together share a commit, so that many clients cost few flushes."""

    def __init__(self, path: Path, tables: str, *, remedy: str) -> None:
        """`tables` makes what is missing of them; `remedy` is what a person can do where the file cannot be used."""
        self.path = path
        self._thread = ThreadPoolExecutor(1, "palestra-journal")
        self._waiting: list[tuple[Change, asyncio.Future[Any]]] = []
        self._worker: asyncio.Task[None] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._thread.submit(self._open, tables).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise StorageError(f"{self.path} cannot be used ({error}); {remedy}") from None

    def _open(self, tables: str) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # two processes on one file would deliver twice
        db.executescript(tables)
        db.execute("BEGIN IMMEDIATE")
        db.execute("COMMIT")
        return db

    def close(self) -> None:
        self._thread.submit(self._db.close)
        self._thread.shutdown()

    async def do(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Apply a change; returns once it is on disk. One that fails changes nothing."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await asyncio.shield(done)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            together, self._waiting = self._waiting, []
            changes = [change for change, _ in together]
            try:
                results = await loop.run_in_executor(self._thread, self._commit, changes)
            except Exception as error:
                results = [error] * len(together)
            for (_, done), result in zip(together, results, strict=True):
                if isinstance(result, Exception):
                    done.set_exception(result)
                    done.exception()  # marks it as read: the client may be gone
                else:
                    done.set_result(result)

    def _commit(self, changes: Sequence[Change]) -> list[Any]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            results = [change(self._db) for change in changes]
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        return results

    def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Query and block: for the start, before requests are served."""
        return self._thread.submit(query, self._db).result()

    def do_now(self, change: Change) -> None:
        """Apply a change and block until it is on disk: where no event loop turns."""
        self._thread.submit(self._commit, [change]).result()
