"""The index of all runs: one SQLite file that many processes read and change concurrently."""

from __future__ import annotations

import os
import random
import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from palestra.core.errors import NotFoundError, ResourceError, did_you_mean
from palestra.core.machine import port_error
from palestra.runs.database import REBUILT, Database, insert, remember
from palestra.runs.limits import Demand, fits
from palestra.runs.processes import Process

State = Literal["pending", "starting", "running", "stopping", "stopped", "completed", "failed"]
ACTIVE: tuple[State, ...] = ("pending", "starting", "running", "stopping")
ENDED: tuple[State, ...] = ("stopped", "completed", "failed")
PARTS = ("api", "trainer", "env")  # the processes of a run over the wire, in the order in which they are started

# Below the range from which systems choose the ports of outgoing connections.
_PORTS = range(20_000, 30_000)
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # without those that look alike

_GPU_SCHEMA = "CREATE TABLE IF NOT EXISTS gpus (device TEXT PRIMARY KEY, run_id TEXT NOT NULL)"  # 0.1 has none


class UnknownRun(NotFoundError):
    """There is no run with this id."""


class TooManyRuns(ResourceError):
    """The limit of running and queued runs is reached."""


@dataclass(frozen=True, slots=True)
class Row:
    """A run in the index. `pid` and `born` identify its supervisor or, for a run in a terminal, the command itself."""

    number: int
    run_id: str
    name: str
    environment: str
    folder: str
    kind: Literal["managed", "foreground"]
    state: State
    reason: str | None
    created: float
    started: float | None
    ended: float | None
    launched: float  # when its supervisor was started
    host: str
    pid: int | None
    born: str | None
    heartbeat: float | None
    gpus: int
    memory_gib: float
    max_runs: int | None

    @classmethod
    def unlisted(cls, values: Mapping[str, Any]) -> Row:
        """Of a run that only its folder knows; its reason would be that the index was lost."""
        missing = {"number": 0, "gpus": 0, "memory_gib": 0.0}
        return cls(**(dict.fromkeys(_COLUMNS) | missing | dict(values) | {"reason": None}))  # type: ignore[arg-type]

    @property
    def supervisor(self) -> Process | None:
        return Process(self.pid, self.born) if self.pid is not None and self.born is not None else None


@dataclass(frozen=True, slots=True)
class PartRow:
    """One process of a run, running or ended."""

    part: str
    process: Process
    exit_code: int | None


_COLUMNS = [f.name for f in fields(Row)]


def palestra_home() -> Path:
    """Where the index of runs is kept: PALESTRA_HOME, or ~/.palestra."""
    return Path(os.environ.get("PALESTRA_HOME") or Path.home() / ".palestra").expanduser().absolute()


class Index:
    """`runs.db` in PALESTRA_HOME. Every change is one transaction; a change of state names the states it may come from.

    One that was lost or damaged is made again from the run folders. With `create=False` nothing is written.
    """

    def __init__(self, home: Path, *, create: bool = True) -> None:
        self.path = home / "runs.db"
        self._database = Database(self.path, writes=create)

    def new_id(self) -> str:
        """Eight letters and digits that no run has."""
        with self._database.open() as db:
            taken = {run_id for (run_id,) in db.execute("SELECT run_id FROM runs")}
        while (run_id := "".join(secrets.choice(_ID_LETTERS) for _ in range(8))) in taken:
            pass
        return run_id

    def add(self, *, max_active: int | None = None, **values: Any) -> None:
        """Add a run, unless `max_active` runs are running or queued already: then PalestraError."""
        with self._database.change() as db:
            if max_active is not None and (active := len(_active_ids(db))) >= max_active:
                raise TooManyRuns(
                    f"{active} runs are running or queued, of at most {max_active}; stop one, or wait for one to end"
                )
            insert(db, values)
        remember(self.path.parent, values)

    def keep(self, row: Row, devices: Sequence[str] = ()) -> None:
        """Write a supervisor's heartbeat; list its run again, with its GPUs, if the index was lost."""
        with self._database.change() as db:
            found = db.execute("SELECT reason FROM runs WHERE run_id = ?", (row.run_id,)).fetchone()
            if found is None or found[0] == REBUILT:
                db.execute("DELETE FROM runs WHERE run_id = ? OR folder = ?", (row.run_id, row.folder))
                insert(db, {name: getattr(row, name) for name in _COLUMNS if name != "number"})
                _hold_gpus(db, row.run_id, devices)
            else:
                mine = (row.heartbeat, row.run_id, row.launched)
                db.execute("UPDATE runs SET heartbeat = ? WHERE run_id = ? AND launched = ?", mine)

    def rows(self, limit: int | None = None, offset: int = 0) -> list[Row]:
        """The newest runs first; all without a limit."""
        with self._database.open() as db:
            return _rows(db, "ORDER BY number DESC LIMIT ? OFFSET ?", -1 if limit is None else limit, offset)

    def active_rows(self) -> list[Row]:
        with self._database.open() as db:
            return _rows(db, f"WHERE state IN {ACTIVE}")

    def row_of(self, folder: str) -> Row | None:
        """The run in this folder."""
        with self._database.open() as db:
            return next(iter(_rows(db, "WHERE folder = ?", folder)), None)

    def count(self) -> int:
        with self._database.open() as db:
            return int(db.execute("SELECT count(*) FROM runs").fetchone()[0])

    def active_ids(self) -> list[str]:
        """The runs that are running or queued, newest first."""
        with self._database.open() as db:
            return _active_ids(db)

    def has(self, run_id: str) -> bool:
        with self._database.open() as db:
            return bool(_rows(db, "WHERE run_id = ?", run_id))

    def row(self, run_id: str) -> Row:
        with self._database.open() as db:
            found = _rows(db, "WHERE run_id = ?", run_id)
            if not found:
                ids = [each for (each,) in db.execute("SELECT run_id FROM runs ORDER BY number DESC LIMIT 100")]
                raise UnknownRun(
                    f"there is no run {run_id[:80]!r}.{did_you_mean(run_id[:80], ids)} See `palestra runs list`"
                )
        return found[0]

    def move(
        self, run_id: str, come_from: Sequence[State], to: State, *, of_launch: float | None = None, **values: Any
    ) -> bool:
        """Change a run's state and other columns, if its state is one of `come_from`. Returns whether it was.

        With `of_launch`, only if the run was not launched again since then: the supervisor of an earlier launch
        must not change the run after it was resumed.
        """
        changes = {"state": to, **values}
        assignments = ", ".join(f"{name} = ?" for name in changes)
        states = ", ".join("?" * len(come_from))
        with self._database.change() as db:
            done = db.execute(
                f"UPDATE runs SET {assignments} "
                f"WHERE run_id = ? AND state IN ({states}) AND launched = ifnull(?, launched)",
                [*changes.values(), run_id, *come_from, of_launch],
            )
            if to in ENDED and done.rowcount:
                db.execute("DELETE FROM ports WHERE run_id = ?", (run_id,))
            return done.rowcount == 1

    def update(self, run_id: str, **values: Any) -> None:
        assignments = ", ".join(f"{name} = ?" for name in values)
        with self._database.change() as db:
            db.execute(f"UPDATE runs SET {assignments} WHERE run_id = ?", [*values.values(), run_id])

    def remove(self, run_id: str) -> bool:
        """Remove a run that has ended from the index."""
        with self._database.change() as db:
            done = db.execute(f"DELETE FROM runs WHERE run_id = ? AND state IN {ENDED}", (run_id,)).rowcount == 1
            if done:
                db.execute("DELETE FROM processes WHERE run_id = ?", (run_id,))
            return done

    def admit(
        self, run_id: str, free_memory_gib: float, machine_gpus: int, default_runs: int, devices: Sequence[str] = ()
    ) -> str | None:
        """Let a pending run start if it is next and there is room; else return what it waits for.

        A run that needs GPUs gets its own of `devices`; `gpus` says which.
        """
        with self._database.change() as db:
            (me,) = _rows(db, "WHERE run_id = ?", run_id)
            if me.state != "pending":
                return None
            others = _rows(db, f"WHERE run_id != ? AND host = ? AND state IN {ACTIVE}", run_id, me.host)
            running = [r.gpus for r in others if r.state != "pending"]
            # runs that need no GPU may pass one that waits for GPUs, other runs may not: many small runs would
            # keep a large one waiting for ever
            waiting = [r for r in others if r.state == "pending" and r.number < me.number]
            before = [r for r in waiting if me.gpus or not r.gpus]
            wait = fits(
                Demand(me.gpus, me.memory_gib), running, me.max_runs or default_runs, machine_gpus, free_memory_gib
            ) or (f"run {before[0].run_id} is before it" if before else None)
            if wait is None:
                db.execute("UPDATE runs SET state = 'starting', reason = NULL WHERE run_id = ?", (run_id,))
                _assign_gpus(db, run_id, devices, me.gpus)
            elif wait != me.reason:
                db.execute("UPDATE runs SET reason = ? WHERE run_id = ?", (wait, run_id))
            return wait

    def claim_port(self, run_id: str, part: str) -> int:
        """A free loopback port that no other run has claimed."""
        with self._database.change() as db:
            taken = {port for (port,) in db.execute("SELECT port FROM ports")}
            for port in random.sample(_PORTS, len(_PORTS)):
                if port not in taken and port_error(port) is None:
                    db.execute("DELETE FROM ports WHERE run_id = ? AND part = ?", (run_id, part))
                    db.execute("INSERT INTO ports VALUES (?, ?, ?)", (port, run_id, part))
                    return port
        raise ResourceError(f"no loopback port from {_PORTS[0]} to {_PORTS[-1]} is free")

    def gpus(self, run_id: str) -> list[str]:
        """The devices that a run was given, by the names that CUDA_VISIBLE_DEVICES takes."""
        with self._database.change() as db:
            db.execute(_GPU_SCHEMA)
            return [device for (device,) in db.execute("SELECT device FROM gpus WHERE run_id = ?", (run_id,))]

    def ports(self, run_id: str) -> dict[str, int]:
        with self._database.open() as db:
            return dict(db.execute("SELECT part, port FROM ports WHERE run_id = ? ORDER BY part", (run_id,)).fetchall())

    def parts(self, run_id: str) -> list[PartRow]:
        with self._database.open() as db:
            rows = db.execute("SELECT part, pid, born, exit_code FROM processes WHERE run_id = ?", (run_id,)).fetchall()
        return [PartRow(part, Process(pid, born), code) for part, pid, born, code in rows]

    def part_started(self, run_id: str, part: str, process: Process) -> None:
        with self._database.change() as db:
            row = (run_id, part, process.pid, process.born)
            db.execute("INSERT OR REPLACE INTO processes VALUES (?, ?, ?, ?, NULL)", row)

    def part_ended(self, run_id: str, part: str, exit_code: int | None) -> None:
        with self._database.change() as db:
            db.execute("UPDATE processes SET exit_code = ? WHERE run_id = ? AND part = ?", (exit_code, run_id, part))

    def forget_parts(self, run_id: str) -> None:
        with self._database.change() as db:
            db.execute("DELETE FROM processes WHERE run_id = ?", (run_id,))


def _rows(db: sqlite3.Connection, which: str, *values: Any) -> list[Row]:
    return [Row(*row) for row in db.execute(f"SELECT {', '.join(_COLUMNS)} FROM runs {which}", values)]


def _active_ids(db: sqlite3.Connection) -> list[str]:
    return [run_id for (run_id,) in db.execute(f"SELECT run_id FROM runs WHERE state IN {ACTIVE} ORDER BY number DESC")]


def _assign_gpus(db: sqlite3.Connection, run_id: str, devices: Sequence[str], count: int) -> None:
    """The first that no active run has; where a run is alone on the machine, and asks for more than there are, all."""
    db.execute(_GPU_SCHEMA)
    db.execute(f"DELETE FROM gpus WHERE run_id NOT IN (SELECT run_id FROM runs WHERE state IN {ACTIVE})")
    db.execute("DELETE FROM gpus WHERE run_id = ?", (run_id,))
    taken = {device for (device,) in db.execute("SELECT device FROM gpus")}
    _hold_gpus(db, run_id, [device for device in devices if device not in taken][:count])


def _hold_gpus(db: sqlite3.Connection, run_id: str, devices: Sequence[str]) -> None:
    db.execute(_GPU_SCHEMA)
    db.executemany("INSERT OR REPLACE INTO gpus VALUES (?, ?)", [(device, run_id) for device in devices])
