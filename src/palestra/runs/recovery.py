"""Runs whose supervisor has died: what they left is ended, and the run says so."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from palestra.runs.explain import redact_logs
from palestra.runs.index import ACTIVE, Index, Row, State
from palestra.runs.processes import end_all, marked, send, this_host

LAUNCH_S = 20.0  # a supervisor has told of itself by then
SILENT_S = 30.0  # one that lives beats every second; a longer silence is looked into
_LOOK_AGAIN_S = 4.0
_PATIENCE_S = 6.0  # for a checkpoint of the last whole step; with what follows, all are gone within 10 s


def reconcile(index: Index) -> None:
    """Find the runs that have died, end what is left of them, and mark them failed."""
    for row in index.rows():
        if row.state in ACTIVE and (reason := death_of(index, row)):
            recover(index, row, reason)


def death_of(index: Index, row: Row) -> str | None:
    """Why nobody looks after a run any more; None while somebody does."""
    silent_s = time.time() - (row.heartbeat or row.launched)
    if row.host != this_host():
        gone = row.kind == "managed" and silent_s > 10 * SILENT_S
        return f"nothing was heard of it on {row.host.split()[0]} for {silent_s:.0f} s" if gone else None
    supervisor = row.supervisor
    if supervisor is None:
        return "its supervisor did not start" if time.time() - row.launched > LAUNCH_S else None
    if not supervisor.is_alive:
        return "its process has died" if row.kind == "foreground" else "its supervisor has died"
    if row.kind == "managed" and silent_s > SILENT_S and _is_silent(index, row):
        return f"its supervisor hangs: it was silent for {silent_s:.0f} s"
    return None


def _is_silent(index: Index, row: Row) -> bool:
    """Whether the heart stands still, and not only the clock or the whole machine has slept."""
    until = time.monotonic() + _LOOK_AGAIN_S
    while time.monotonic() < until:
        time.sleep(0.2)
        now = index.row(row.run_id)
        if now.heartbeat != row.heartbeat or now.state != row.state:
            return False
    return True


def recover(index: Index, row: Row, reason: str) -> None:
    """Say why, end all processes of a run that nobody looks after, and mark it. Who comes second finds it done."""
    if index.row(row.run_id).launched != row.launched:  # resumed meanwhile
        return
    wanted = row.state == "stopping" and row.reason is None  # somebody was stopping it, and nothing had gone wrong
    if row.state == "stopping" and row.reason:
        reason = f"{row.reason}; then {reason}"
    if not wanted:
        index.move(row.run_id, [row.state], "stopping", of_launch=row.launched, reason=reason)
    if row.host == this_host():
        if row.kind == "managed" and row.supervisor is not None:
            send(row.supervisor, signal.SIGKILL)
        left = {part.process.pid: part.process for part in index.parts(row.run_id) if part.exit_code is None}
        left |= {process.pid: process for process in marked(row.run_id)}
        end_all(left.values(), _PATIENCE_S)
        redact_logs(Path(row.folder))
    end: State = "stopped" if wanted else "failed"
    hint = "it was being stopped" if wanted else f"palestra runs resume {row.run_id} goes on"
    index.move(row.run_id, ["stopping"], end, of_launch=row.launched, reason=f"{reason}; {hint}", ended=time.time())
