"""List a training of this process in the index, next to background runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError, StateError, text_of
from palestra.core.ranks import is_first_rank
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import redact
from palestra.runs.index import ACTIVE, ENDED, Index, Row, State, new_id, palestra_home, subject_of
from palestra.runs.processes import RUN_VARIABLE, held_error, hold, holder, this_host, this_process

log = logging.getLogger("palestra")


@contextlib.contextmanager
def listed(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and list the run unless its supervisor or the caller does; refuse a folder in use."""
    me = this_process()
    if holder(folder) == {"pid": me.pid, "born": me.born, "host": this_host()}:
        yield
        return
    with hold(folder):
        if has_supervisor():
            yield
            return
        index = _open_index()
        with contextlib.suppress(OSError):  # the run goes on without the index
            _list(index, folder.resolve())
        try:
            yield
        except KeyboardInterrupt:
            _end(index, folder, "stopped")
            raise
        except BaseException as error:
            _end(index, folder, "failed", text_of(error))
            raise
        _end(index, folder, "completed")


def listed_early(folder: Path, resumed: object, ends_at_start: bool = False) -> contextlib.AbstractContextManager[None]:
    """List a new run before its parts are built: if it is killed then, its folder is still one's own."""
    return contextlib.nullcontext() if resumed or ends_at_start or not is_first_rank() else listed(folder)


def refuse_busy(folder: Path) -> None:
    """Refuse a folder in which another process trains, before anything is loaded."""
    if not has_supervisor() and (index := _open_index()) is not None:
        row = None
        with contextlib.suppress(OSError):
            row = index.record_of(folder.resolve())
        if row is not None and row.state in ACTIVE:
            raise _busy(row)
    if holder(folder) is not None:
        raise held_error(folder)


def has_supervisor() -> bool:
    """Whether a supervisor writes the run's record. On Windows runs are not listed at all."""
    return RUN_VARIABLE in os.environ or sys.platform == "win32"


def mark_failed(folder: Path, reason: str) -> None:
    """Mark the run as failed, for a process that exits without leaving `listed`."""
    with contextlib.suppress(PalestraError, OSError):
        _end(None if has_supervisor() else Index(palestra_home()), folder, "failed", reason)


def _open_index() -> Index | None:
    try:
        index = Index(palestra_home())
        index.end_dead_runs()
    except (PalestraError, OSError) as error:
        log.warning("this run will be missing in `palestra runs list`: %s", error)
        return None
    return index


def _list(index: Index | None, folder: Path) -> None:
    """List the run. A folder in which another process trains is refused again: it may just have begun."""
    if index is None:
        return
    now, me = time.time(), this_process()
    process: dict[str, Any] = {"pid": me.pid, "born": me.born, "host": this_host(), "launched": now, "started": now}
    if not index.lists(folder):
        record = RunFolder.open(folder).record
        index.add(
            run_id=new_id(), name=str(record["name"]), environment=subject_of(record), folder=str(folder),
            kind="foreground", state="running", created=now, **process,
        )  # fmt: skip
        return
    row = index.row_in(folder)
    changes: dict[str, Any] = {"kind": "foreground", "reason": None, "ended": None, "parts": {}, **process}
    is_mine = row.supervisor == me  # by the lock of a folder whose record was lost
    if not index.move(row.run_id, (*ENDED, *ACTIVE) if is_mine else ENDED, "running", **changes):
        raise _busy(row)


def _end(index: Index | None, folder: Path, state: State, reason: str | None = None) -> None:
    text = None if reason is None else redact(reason)
    with contextlib.suppress(OSError):
        if index is not None and (row := index.record_of(folder.resolve())) is not None:
            index.move(row.run_id, ACTIVE, state, reason=text, ended=time.time())


def _busy(row: Row) -> PalestraError:
    return StateError(
        f"{row.folder} is run {row.run_id}, which is {row.state}; watch it with: palestra runs watch {row.run_id}, "
        f"or stop it first: palestra runs stop {row.run_id}"
    )
