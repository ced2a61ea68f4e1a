"""The runs of this machine: each folder holds its run's record, index.json, and runs.txt in PALESTRA_HOME lists them.

The list is a cache: if it is lost, `Index.find_runs` reads the run folders below all output folders.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field

from palestra.core.errors import (
    NotFoundError,
    PalestraError,
    ResourceError,
    StateError,
    StorageError,
    did_you_mean,
    text_of,
)
from palestra.core.files import read_regular, write_json, write_text
from palestra.core.ranks import is_first_rank
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import redact
from palestra.runs.processes import (
    RUN_VARIABLE,
    Process,
    descendants,
    end_all,
    held_error,
    hold,
    holder,
    processes_of_run,
    this_host,
    this_process,
)

State = Literal["pending", "starting", "running", "stopping", "stopped", "completed", "failed"]
ACTIVE: tuple[State, ...] = ("pending", "starting", "running", "stopping")
ENDED: tuple[State, ...] = ("stopped", "completed", "failed")
PARTS = ("api", "trainer", "env")  # the processes of a run over the wire, in the order in which they are started

_HEADER = "palestra runs 1"  # the first line of runs.txt; the run folders follow, one per line, oldest first
_LOCK_S = 30.0
_DEPTH = 3  # levels below an output folder in which runs are searched
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # without those that look alike
_IDENTITY = ("run_id", "name", "environment", "kind", "created")  # of an index.json without our seal
_UNREADABLE = (OSError, ValueError, PalestraError, KeyError, TypeError)  # files of a damaged or foreign folder
_LAUNCH_S = 20.0  # a supervisor has registered itself by then
_OTHER_HOST_S = 300.0  # supervisors touch index.json more often
_TERMINATE_S = 6.0  # for a checkpoint of the last step; together with SIGKILL, all processes are gone within 10 s


class UnknownRun(NotFoundError):
    """There is no run with this id."""


class TooManyRuns(ResourceError):
    """The limit of running and queued runs is reached."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """One process of a run, running or ended."""

    process: Process
    exit_code: int | None = None


class Row(BaseModel):
    """A run's record. `pid` and `born` identify its supervisor or, for a run in a terminal, the command itself."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    run_id: str = Field(pattern="^[a-z0-9]{1,64}$")
    name: str
    environment: str
    folder: str = Field(exclude=True)
    kind: Literal["managed", "foreground"]
    state: State
    reason: str | None = None
    created: float
    started: float | None = None
    ended: float | None = None
    launched: float  # when its supervisor was started
    host: str
    pid: int | None = None
    born: str | None = None
    gpus: int = 0
    parts: dict[str, PartRow] = Field(default_factory=dict)
    ports: dict[str, int] = Field(default_factory=dict)

    @property
    def supervisor(self) -> Process | None:
        return Process(self.pid, self.born) if self.pid is not None and self.born is not None else None


def palestra_home() -> Path:
    """The folder of the index of runs: PALESTRA_HOME, or ~/.palestra."""
    return Path(os.environ.get("PALESTRA_HOME") or Path.home() / ".palestra").expanduser().absolute()


def new_id() -> str:
    """Eight random letters and digits."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(8))


def id_of(folder: Path) -> str:
    """An id from the folder's path, always the same: for folders without an id, or with one of another folder."""
    return hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()


def run_folders(path: Path, depth: int = _DEPTH) -> Iterator[RunFolder]:
    """The run folders at a path: itself, or those below it."""
    folder = RunFolder(path.absolute())
    if folder.has_begun or folder.request_file.is_file():
        yield folder
    elif depth and path.is_dir():
        for below in sorted(path.iterdir()):
            if below.is_dir() and not below.is_symlink() and not below.name.startswith("."):
                yield from run_folders(below, depth - 1)


class Index:
    """The list of run folders, and their records. A change of state names the states that it may come from.

    A record counts only with the seal of this home and this folder: copies and downloads have another one.
    With `create=False` nothing is written.
    """

    def __init__(self, home: Path, *, create: bool = True) -> None:
        self.path, self._key_file, self._output_folders = home / "runs.txt", home / "key", home / "folders.txt"
        self._lock = FileLock(home / "runs.lock", timeout=_LOCK_S)
        self._writes = create
        self._folder_of: dict[str, Path] = {}
        if create and not _lines(self._key_file):
            try:
                home.mkdir(parents=True, exist_ok=True)
                with self._lock:
                    if not _lines(self._key_file):
                        write_text(self._key_file, secrets.token_hex(32))
                        self._key_file.chmod(0o600)
            except OSError as error:
                raise StorageError(
                    f"the index of runs in {home} cannot be written ({error}); "
                    "set PALESTRA_HOME to a folder that you may write to"
                ) from None

    def folders(self) -> list[Path]:
        """The folders of all listed runs, oldest first."""
        header, *lines = _lines(self.path) or [""]
        if header == _HEADER:
            return list(map(Path, lines))
        if not self._writes:
            return self.find_runs()
        with self._lock:
            self._write_list(paths := self.find_runs())
        return paths

    def find_runs(self) -> list[Path]:
        """Search the output folders for the runs that this home has started; oldest first."""
        rows: dict[str, Row] = {}
        lines = _lines(self._output_folders)  # written with a slash at the end; 0.2.0 wrote each run folder, without
        for root in (*map(Path, lines), self.path.parent / "runs", Path("runs")):
            for run in run_folders(root, depth=1):
                with contextlib.suppress(*_UNREADABLE):
                    row = self.record_of(run.path) or (row_from_folder(run) if str(run.path) in lines else None)
                    if row is not None:
                        rows.setdefault(row.run_id, row)
        return [Path(row.folder) for row in sorted(rows.values(), key=lambda row: row.created)]

    def record_of(self, folder: Path) -> Row | None:
        """The record in a folder; None if there is none, or it was written by another home or for another folder."""
        try:
            values = json.loads(read_regular(RunFolder(folder).index_file))
            if secrets.compare_digest(values["seal"], self._seal(folder)):
                return Row(**{**values, "folder": str(folder)})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass
        return None

    def _seal(self, folder: Path) -> str:
        """A digest of the folder's path that only a process with this home's key can compute."""
        key = self._key_file.read_bytes()[:64] or secrets.token_bytes(64)  # an empty key would be no secret
        return hashlib.blake2b(str(folder.resolve()).encode(), key=key, digest_size=16).hexdigest()

    def row_in(self, folder: Path) -> Row:
        """The run in a folder: its record, or what its other files say."""
        return with_death(self.record_of(folder) or row_from_folder(RunFolder(folder)))

    def rows(self, limit: int | None = None, offset: int = 0) -> list[Row]:
        """The newest runs first; all without a limit."""
        return list(islice(self._rows(), offset, None if limit is None else offset + limit))

    def _rows(self) -> Iterator[Row]:
        for folder in reversed(self.folders()):
            with contextlib.suppress(*_UNREADABLE):
                yield self.row_in(folder)

    def count(self) -> int:
        return sum(folder.is_dir() for folder in self.folders())

    def lists(self, folder: Path) -> bool:
        """Whether exactly this folder is listed. The id in a folder is no proof: a copy has that of its original."""
        return bool({folder, folder.resolve()} & set(self.folders()))

    def row(self, run_id: str) -> Row:
        """The run with this id; UnknownRun if none is listed."""
        if (folder := self._folder_of.get(run_id)) and (row := self.record_of(folder)) and row.run_id == run_id:
            return with_death(row)
        ids = []
        for row in self._rows():
            self._folder_of[row.run_id] = Path(row.folder)
            if row.run_id == run_id:
                return row
            ids.append(row.run_id)
        raise UnknownRun(f"there is no run {run_id[:80]!r}.{did_you_mean(run_id[:80], ids)} See `palestra runs list`")

    def add(self, *, max_active: int | None = None, **values: Any) -> None:
        """Add a run, unless `max_active` runs are running or queued already: then TooManyRuns."""
        with self._lock:
            if max_active is not None and (active := sum(row.state in ACTIVE for row in self.rows())) >= max_active:
                raise TooManyRuns(
                    f"{active} runs are running or queued, of at most {max_active}; stop one, or wait for one to end"
                )
            self.write(Row(**values))

    def write(self, row: Row) -> None:
        """Write a run's record, and list its folder."""
        folder, values = Path(row.folder), row.model_dump(mode="json")
        with self._lock:
            write_json(RunFolder(folder).index_file, {**values, "seal": self._seal(folder)})
            self._folder_of[row.run_id] = folder
            if folder not in (folders := self.folders()):
                self._write_list([*folders, folder])
            if (line := f"{folder.parent}/") not in _lines(self._output_folders):
                with self._output_folders.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")

    def _write_list(self, folders: Sequence[Path]) -> None:
        write_text(self.path, "".join(f"{line}\n" for line in (_HEADER, *folders)))

    def update(self, run_id: str, **values: Any) -> bool:
        """Change values of a run's record."""
        return self.move(run_id, (*ACTIVE, *ENDED), None, **values)

    def move(
        self, run_id: str, come_from: Sequence[State], to: State | None, *, of_launch: float = 0.0, **values: Any
    ) -> bool:
        """Change a run's state and other values, if its state is one of `come_from`. Returns whether it was.

        With `of_launch`, only if the run was not launched again since then: the supervisor of an earlier launch
        must not change the run after it was resumed.
        """
        with self._lock:
            row = self.row(run_id)
            row = self.record_of(Path(row.folder)) or row  # in the state of its record, not that of a dead run
            if row.state not in come_from or of_launch not in (0.0, row.launched):
                return False
            self.write(row.model_copy(update={"state": to or row.state, **values}))
        return True

    def remove(self, run_id: str) -> bool:
        """Remove a run that has ended from the list."""
        with self._lock:
            row = self.row(run_id)
            if row.state in ENDED:
                self._write_list([folder for folder in self.folders() if folder != Path(row.folder)])
            return row.state in ENDED

    def end_dead_runs(self) -> list[str]:
        """End the processes that dead runs have left behind, and record how the runs ended. Returns their ids."""
        dead: list[str] = []
        for row in filter(None, map(self.record_of, self.folders())):
            if death_of(row) is None:
                continue
            if row.host == this_host():
                # first of all: once their parents are gone, descendants are not found any more
                left = {part.process for part in row.parts.values() if part.exit_code is None}
                left |= {below for process in left for below in descendants(process.pid)}
                end_all(left | set(processes_of_run(row.run_id)), _TERMINATE_S)
            end = with_death(row)
            changes = {"reason": end.reason, "ended": end.ended}
            if self.move(row.run_id, [row.state], end.state, of_launch=row.launched, **changes):
                dead.append(row.run_id)
        return dead


def death_of(row: Row) -> str | None:
    """Why a run that is recorded as active is dead; None if it is alive. Only reads, and does not block."""
    if row.state not in ACTIVE:
        return None
    if row.host != this_host():
        silent_s = time.time() - _changed(RunFolder(Path(row.folder)))
        is_dead = row.kind == "managed" and silent_s > _OTHER_HOST_S
        return f"nothing was heard of it on {row.host.split()[0]} for {silent_s:.0f} s" if is_dead else None
    if row.supervisor is None:
        return "its supervisor did not start" if time.time() - row.launched > _LAUNCH_S else None
    if not row.supervisor.is_alive:
        return "its process has died" if row.kind == "foreground" else "its supervisor has died"
    return None


def with_death(row: Row) -> Row:
    """The row; of a dead run, as it will be once its processes have ended, which may still be saving a checkpoint."""
    if (reason := death_of(row)) is None:
        return row
    if row.state == "stopping" and row.reason:
        reason = f"{row.reason}; then {reason}"
    if row.host == this_host() and any(part.exit_code is None and part.process.is_alive for part in row.parts.values()):
        return row.model_copy(update={"state": "stopping", "reason": reason})
    if row.state == "stopping" and row.reason is None:  # it was asked for, and nothing had gone wrong before
        state, reason = "stopped", f"{reason}; it was being stopped"
    else:
        state, reason = "failed", f"{reason}; continue it with: palestra runs resume {row.run_id}"
    return row.model_copy(update={"state": state, "reason": reason, "ended": _changed(RunFolder(Path(row.folder)))})


def row_from_folder(folder: RunFolder) -> Row:
    """A run without a record of this home, by run.json, its lock and its other files."""
    record = folder.record if folder.has_begun else dict(json.loads(read_regular(folder.request_file)))
    changed, process = _changed(folder), holder(folder.path)
    try:
        created = time.mktime(time.strptime(str(record.get("created")), "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        created = changed
    values: dict[str, Any] = {
        "run_id": id_of(folder.path), "name": str(record.get("name") or folder.path.name), "folder": str(folder.path),
        "environment": subject_of(record), "kind": "foreground", "created": created, "started": created,
        "launched": created, "host": this_host(), "ended": changed,
        "state": "completed" if folder.model.is_dir() else "stopped",
    }  # fmt: skip
    if process is not None:
        values |= process | {"state": "running", "ended": None}
    row = Row(**values)
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # the file may come from somebody else
        known = dict(json.loads(read_regular(folder.index_file)))
        for name in _IDENTITY if process is None else _IDENTITY[:-1]:  # the kind of process is known
            with contextlib.suppress(ValueError):
                row = Row(**{**row.model_dump(), "folder": row.folder, name: known.get(name)})
    return row


def subject_of(record: Mapping[str, Any]) -> str:
    """What a run trains on, by its run.json: its environment, or the name of its agent file."""
    match record.get("environment"):
        case {"name": str(name)}:
            return name
    return Path(str(record.get("source") or record.get("name") or "")).stem


def _changed(folder: RunFolder) -> float:
    """Time of a run's last sign of life, in seconds since the epoch."""
    files = (folder.metrics_file, folder.index_file, folder.config_file, folder.request_file)
    return max((path.stat().st_mtime for path in files if path.is_file()), default=0.0)


def _lines(path: Path) -> list[str]:
    """The lines of a text file; none if it is missing or damaged."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []


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
        if (index := _open_index()) is not None:
            with contextlib.suppress(OSError):  # the run goes on without the index
                _list(index, folder.resolve())
        state: State = "completed"
        reason = None
        try:
            yield
        except BaseException as error:
            is_stop = isinstance(error, KeyboardInterrupt)
            state, reason = ("stopped", None) if is_stop else ("failed", text_of(error))
            raise
        finally:
            _end(index, folder, state, reason)


def listed_early(folder: Path, resumed: object, ends_at_start: bool = False) -> contextlib.AbstractContextManager[None]:
    """List a new run before its parts are built: if it is killed then, its folder is still one's own."""
    return contextlib.nullcontext() if resumed or ends_at_start or not is_first_rank() else listed(folder)


def refuse_busy(folder: Path) -> None:
    """Refuse a folder in which another process trains, before anything is loaded."""
    index = None if has_supervisor() else _open_index()
    if index is not None and (row := index.record_of(folder.resolve())) and row.state in ACTIVE:
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


def _list(index: Index, folder: Path) -> None:
    """List the run. A folder in which another process trains is refused again: it may just have begun."""
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
    with contextlib.suppress(OSError):
        if index is not None and (row := index.record_of(folder.resolve())) is not None:
            index.move(row.run_id, ACTIVE, state, reason=reason and redact(reason), ended=time.time())


def _busy(row: Row) -> PalestraError:
    return StateError(
        f"{row.folder} is run {row.run_id}, which is {row.state}; watch it with: palestra runs watch {row.run_id}, "
        f"or stop it first: palestra runs stop {row.run_id}"
    )
