"""Lists a training that runs in this process in the index, beside those in the background."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import redact
from palestra.runs.folder_lock import hold, refuse_held
from palestra.runs.index import ACTIVE, ENDED, Index, Row, State, palestra_home
from palestra.runs.processes import RUN_VARIABLE, this_host, this_process
from palestra.runs.recovery import reconcile

log = logging.getLogger("palestra")


@contextlib.contextmanager
def listed(folder: Path) -> Iterator[None]:
    """Hold the folder's lock and list the run while it trains, unless its supervisor lists it.

    A folder in which another process trains is refused.
    """
    with hold(folder):
        if has_supervisor():
            yield
            return
        run = ForegroundRun()
        run.begin(folder)
        try:
            yield
        except KeyboardInterrupt:
            run.end("stopped")
            raise
        except BaseException as error:
            run.end("failed", f"{type(error).__name__}: {error}")
            raise
        run.end("completed")


def refuse_busy(folder: Path) -> None:
    """Refuse a folder in which another process trains, before anything is loaded."""
    if not has_supervisor():
        ForegroundRun().refuse_busy(folder)
    refuse_held(folder)


def has_supervisor() -> bool:
    """Whether a supervisor keeps the run's row. On Windows runs are not listed at all."""
    return RUN_VARIABLE in os.environ or sys.platform == "win32"


def mark_failed(folder: Path, reason: str) -> None:
    """For a process that ends at once, without leaving `listed`."""
    if not has_supervisor():
        ForegroundRun().mark_failed(folder, reason)


class ForegroundRun:
    """The row of a training that runs in this process. An index that cannot be written does not stop it."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home or palestra_home()
        self._index: Index | None = None
        self._run_id = ""

    def begin(self, folder: Path) -> None:
        """List the run. A folder in which another process trains is refused again: it may just have begun."""
        index = self._open_index()
        if index is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                self._list(index, folder.resolve())
                self._index = index

    def refuse_busy(self, folder: Path) -> None:
        index, row = self._open_index(), None
        with contextlib.suppress(sqlite3.Error, OSError):
            row = None if index is None else index.row_of(str(folder.resolve()))
        if row is not None and row.state in ACTIVE:
            raise _busy(row)

    def _open_index(self) -> Index | None:
        try:
            index = Index(self._home)
            reconcile(index)
        except (PalestraError, sqlite3.Error, OSError) as error:
            log.warning("this run will be missing in `palestra runs list`: %s", error)
            return None
        return index

    def _list(self, index: Index, folder: Path) -> None:
        now, me = time.time(), this_process()
        process: dict[str, Any] = {"pid": me.pid, "born": me.born, "host": this_host(), "launched": now, "started": now}
        row = index.row_of(str(folder))
        if row is None:
            self._run_id = index.new_id()
            record = RunFolder.open(folder).record
            index.add(
                run_id=self._run_id, name=str(record["name"]), environment=_subject(record), folder=str(folder),
                kind="foreground", state="running", created=now, **process,
            )  # fmt: skip
            return
        self._run_id = row.run_id
        changes: dict[str, Any] = {"kind": "foreground", "reason": None, "ended": None, "heartbeat": None, **process}
        is_mine = row.supervisor == me  # read from our folder, when the index was lost
        if not index.move(row.run_id, (*ENDED, *ACTIVE) if is_mine else ENDED, "running", **changes):
            raise _busy(row)

    def mark_failed(self, folder: Path, reason: str) -> None:
        with contextlib.suppress(PalestraError, sqlite3.Error, OSError):
            self._index = Index(self._home)
            row = self._index.row_of(str(folder.resolve()))
            self._run_id = "" if row is None else row.run_id
            self.end("failed", reason)

    def end(self, state: State, reason: str | None = None) -> None:
        if self._index is not None:
            text = None if reason is None else redact(reason)
            with contextlib.suppress(sqlite3.Error, OSError):
                self._index.move(self._run_id, ACTIVE, state, reason=text, ended=time.time())


def _busy(row: Row) -> PalestraError:
    return PalestraError(
        f"{row.folder} is run {row.run_id}, which is {row.state}; watch it with: palestra runs watch {row.run_id}, "
        f"or stop it first: palestra runs stop {row.run_id}"
    )


def _subject(record: dict[str, object]) -> str:
    environment = record.get("environment")
    if isinstance(environment, dict):
        return str(environment.get("name"))
    return Path(str(record.get("source") or record["name"])).stem
