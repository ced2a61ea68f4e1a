"""Finds runs that have died; ends the processes they left behind, and marks them in the index."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from palestra.runs.index import ACTIVE, Index, Row, State
from palestra.runs.processes import descendants, end_all, processes_of_run, send, this_host

SUPERVISOR_DIED = "its supervisor has died"
LAUNCH_TIMEOUT_S = 20.0  # a supervisor has registered itself by then
HEARTBEAT_TIMEOUT_S = 30.0  # supervisors write a heartbeat every second
_OTHER_HOST_TIMEOUT_S = 10 * HEARTBEAT_TIMEOUT_S  # clocks differ, and its processes cannot be looked at
_RECHECK_S = 4.0
_TERMINATE_S = 6.0  # for a checkpoint of the last step; together with SIGKILL, all processes are gone within 10 s


def death_of(row: Row) -> str | None:
    """Why a run that the index calls active is dead; None if it is alive. Only reads, and does not block."""
    if row.state not in ACTIVE:
        return None
    silent_s = time.time() - (row.heartbeat or row.launched)
    if row.host != this_host():
        is_dead = row.kind == "managed" and silent_s > _OTHER_HOST_TIMEOUT_S
        return f"nothing was heard of it on {row.host.split()[0]} for {silent_s:.0f} s" if is_dead else None
    if row.supervisor is None:
        return "its supervisor did not start" if time.time() - row.launched > LAUNCH_TIMEOUT_S else None
    if not row.supervisor.is_alive:
        return "its process has died" if row.kind == "foreground" else SUPERVISOR_DIED
    return None


def seconds_without_heartbeat(row: Row) -> float | None:
    """For how long the supervisor, although alive, has been overdue with its heartbeat; None if it is not."""
    if row.state not in ACTIVE or row.kind != "managed" or row.host != this_host():
        return None
    silent_s = time.time() - (row.heartbeat or row.launched)
    return silent_s if silent_s > HEARTBEAT_TIMEOUT_S else None


def outcome_of(row: Row, reason: str) -> tuple[State, str]:
    """The state in which a dead run ends, and the whole reason."""
    if _is_being_stopped(row):
        return "stopped", f"{reason}; it was being stopped"
    return "failed", f"{_with_earlier(row, reason)}; continue it with: palestra runs resume {row.run_id}"


def reconcile(index: Index) -> list[str]:
    """Find the runs that have died or hang, end what is left of them, and mark them. Returns their ids."""
    ended: list[str] = []
    for row in index.active_rows():
        if reason := death_of(row) or _hang_of(index, row):
            recover(index, row, reason)
            ended.append(row.run_id)
    return ended


def recover_own(home: Path, run_id: str, supervisor: int) -> None:
    """Mark the run of this process, whose supervisor has died, and end what is left of it."""
    index = Index(home)
    row = index.row(run_id)
    if row.state in ACTIVE and row.pid == supervisor:
        recover(index, row, SUPERVISOR_DIED)


def recover(index: Index, row: Row, reason: str) -> None:
    """End all processes of a run whose supervisor is gone, and mark it. Safe to call from several processes."""
    if index.row(row.run_id).launched != row.launched:  # it was resumed in the meantime
        return
    state, text = outcome_of(row, reason)
    if not _is_being_stopped(row):  # so that the reason can be read while the processes are being ended
        earlier = _with_earlier(row, reason)
        index.move(row.run_id, [row.state], "stopping", of_launch=row.launched, reason=earlier)
    if row.host == this_host():
        # first of all: once their parents are gone, descendants are not found any more
        left = {part.process for part in index.parts(row.run_id) if part.exit_code is None}
        left |= {below for process in left for below in descendants(process.pid)} | set(processes_of_run(row.run_id))
        if row.kind == "managed" and row.supervisor is not None:
            send(row.supervisor, signal.SIGKILL)
        end_all(left, _TERMINATE_S)
    index.move(row.run_id, ["stopping"], state, of_launch=row.launched, reason=text, ended=time.time())


def _is_being_stopped(row: Row) -> bool:
    """Somebody asked for it, and nothing had gone wrong before."""
    return row.state == "stopping" and row.reason is None


def _with_earlier(row: Row, reason: str) -> str:
    """What had gone wrong before comes first."""
    is_other = row.state == "stopping" and row.reason not in (None, reason)
    return f"{row.reason}; then {reason}" if is_other else reason


def _hang_of(index: Index, row: Row) -> str | None:
    """That a supervisor hangs. Watches it for some seconds: after a machine's sleep all heartbeats are overdue."""
    silent_s = seconds_without_heartbeat(row)
    if silent_s is None:
        return None
    until = time.monotonic() + _RECHECK_S
    while time.monotonic() < until:
        time.sleep(0.2)
        now = index.row(row.run_id)
        if now.heartbeat != row.heartbeat or now.state != row.state:
            return None
    return f"its supervisor hangs: it sent no heartbeat for {silent_s:.0f} s"
