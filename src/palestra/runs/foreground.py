"""A training in a terminal, listed beside those in the background."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.secrets import redact
from palestra.runs.index import ACTIVE, ENDED, Index, Row, State
from palestra.runs.manager import new_id, palestra_home
from palestra.runs.processes import this_host, this_process
from palestra.runs.recovery import reconcile
from palestra.runs.store import RunFolder


class ForegroundRun:
    """The row of a training that this very process does. An index that cannot be written holds up nothing."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home or palestra_home()
        self._index: Index | None = None
        self._run_id = ""

    def begin(self, folder: Path) -> None:
        """List the run; a folder in which another process trains is refused here, too: it may just have begun."""
        try:
            index = Index(self._home)
            reconcile(index)
            self._list(index, folder.resolve())
            self._index = index
        except (sqlite3.Error, OSError):
            return

    def refuse_busy(self, folder: Path) -> None:
        """Refuse a folder in which another process trains."""
        try:
            index = Index(self._home)
            reconcile(index)
            row = next((row for row in index.rows() if row.folder == str(folder.resolve())), None)
        except (sqlite3.Error, OSError):
            return
        if row is not None and row.state in ACTIVE:
            raise _busy(row)

    def _list(self, index: Index, folder: Path) -> None:
        now, me = time.time(), this_process()
        mine = {"pid": me.pid, "born": me.born, "host": this_host(), "launched": now, "started": now}
        known = next((row for row in index.rows() if row.folder == str(folder)), None)
        if known is None:
            self._run_id = new_id(index)
            record = RunFolder.open(folder).record
            index.add(
                run_id=self._run_id, name=str(record["name"]), environment=_subject(record), folder=str(folder),
                kind="foreground", state="running", created=now, **mine,
            )  # fmt: skip
            return
        self._run_id = known.run_id
        again: dict[str, Any] = {"kind": "foreground", "reason": None, "ended": None, "heartbeat": None, **mine}
        if not index.move(known.run_id, ENDED, "running", **again):
            raise _busy(known)

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
