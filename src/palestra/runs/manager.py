"""The run manager: start, look at, stop, resume. Whoever calls it may go away; the runs stay."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from palestra.core.errors import PalestraError
from palestra.runs import limits, plan
from palestra.runs.explain import tail
from palestra.runs.index import ACTIVE, ENDED, Index, Row, State
from palestra.runs.processes import MARK, send, this_host
from palestra.runs.recovery import reconcile
from palestra.runs.request import FILE, RunRequest
from palestra.runs.store import RunFolder, new_folder
from palestra.runs.view import Run, results, view
from palestra.tracking.jsonl import read_metrics

__all__ = ["ACTIVE", "Part", "Run", "RunManager", "RunRequest", "State", "palestra_home"]

Part = Literal["trainer", "env", "api", "supervisor"]
Runs = list[Run]
Lines = list[str]
Rows = list[dict[str, float]]

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_POLL_S = 0.1


def palestra_home() -> Path:
    """Where the index of runs lives: PALESTRA_HOME, or ~/.palestra."""
    return Path(os.environ.get("PALESTRA_HOME") or Path.home() / ".palestra").expanduser().absolute()


class RunManager:
    """All runs of one home. Every call first finds out which of them have died.

    A new run's folder is made in its setting `output_dir`, or in `runs` of the home.
    """

    def __init__(self, home: Path | None = None, *, max_runs: int | None = None) -> None:
        self.home = palestra_home() if home is None else home.absolute()
        self.max_runs = max_runs
        self._index = Index(self.home)

    def start(self, request: RunRequest) -> Run:
        """Start a run in the background, or queue it; returns at once. Bad settings raise PalestraError."""
        request.check()
        wire = plan.is_on_the_wire(request)
        parent = Path(str(request.settings.get("output_dir") or self.home / "runs")).expanduser().absolute()
        name = request.name or request.subject
        folder = new_folder(parent, name)
        request.save(folder, Path.cwd())
        if wire:
            (folder / plan.WIRE).mkdir()
        demand = limits.demand_of(request.settings, limits.count_gpus(), 3 if wire else 1)
        now, run_id = time.time(), new_id(self._index)
        self._index.add(
            run_id=run_id, name=name, environment=request.subject, folder=str(folder), kind="managed",
            state="pending", created=now, launched=now, host=this_host(), gpus=demand.gpus,
            memory_gib=demand.memory_gib, max_runs=self.max_runs,
        )  # fmt: skip
        self._launch(run_id, folder)
        return self._view(self._index.row(run_id))

    def get(self, run_id: str) -> Run:
        """The run, or PalestraError where there is none of this id."""
        return self._view(self._row(run_id))

    def list(self) -> Runs:
        """All runs, newest first."""
        reconcile(self._index)
        return [self._view(row) for row in self._index.rows()]

    def stop(self, run_id: str, wait_s: float = 60.0) -> Run:
        """Stop a run with a checkpoint, and wait until it has ended (at most `wait_s`)."""
        row = self._row(run_id)
        if row.state in ENDED:
            raise PalestraError(f"the run {run_id} has ended already; it is {row.state}")
        self._index.move(run_id, ["pending", "starting", "running"], "stopping")
        if row.kind == "foreground" and row.supervisor is not None and row.host == this_host():
            send(row.supervisor, signal.SIGTERM)
        until = time.monotonic() + wait_s
        while self._row(run_id).state not in ENDED and time.monotonic() < until:
            time.sleep(_POLL_S)
        return self.get(run_id)

    def resume(self, run_id: str, *, max_steps: int | None = None) -> Run:
        """Go on with a run that was stopped or failed, from its last checkpoint; with more steps, a complete one."""
        row = self._row(run_id)
        resumable: list[State] = ["stopped", "failed"] if max_steps is None else ["stopped", "failed", "completed"]
        if row.state == "completed" and max_steps is None:
            raise PalestraError(f"the run {run_id} is complete; give it more steps to go on with (--max-steps)")
        if row.state not in resumable:
            raise PalestraError(f"the run {run_id} is {row.state}; only one that was stopped or has failed can go on")
        folder = Path(row.folder)
        if not folder.is_dir():
            raise PalestraError(f"the folder of run {run_id} is gone: {folder}; start a new run")
        if not (folder / FILE).is_file():
            _adopt(folder)
        if max_steps is not None:
            if not (folder / "run.json").is_file():
                raise PalestraError(f"the run {run_id} had not begun; resume it without --max-steps")
            RunFolder(folder).lengthen(max_steps)
        now = time.time()
        back = {"reason": None, "ended": None, "launched": now, "pid": None, "born": None, "heartbeat": None}
        self._index.forget_parts(run_id)
        if not self._index.move(
            run_id, resumable, "pending", kind="managed", host=this_host(), max_runs=self.max_runs, **back
        ):
            raise PalestraError(f"the run {run_id} was just resumed by somebody else")
        self._launch(run_id, folder)
        return self.get(run_id)

    def remove(self, run_id: str, *, keep_folder: bool = False) -> None:
        """Forget a run that has ended, and delete its folder."""
        row = self._row(run_id)
        if not self._index.remove(run_id):
            raise PalestraError(f"the run {run_id} is {row.state}; stop it first: palestra runs stop {run_id}")
        folder = Path(row.folder)
        if not keep_folder and any((folder / name).is_file() for name in (FILE, "run.json")):
            shutil.rmtree(folder, ignore_errors=True)

    def logs(self, run_id: str, part: Part = "trainer", lines: int = 50) -> Lines:
        """The last lines of a part's log, without secrets; empty where it has written nothing."""
        known = self.get(run_id).logs
        if part not in known:
            has = f"it has {', '.join(known)}" if known else "it was started in a terminal, and wrote there"
            raise PalestraError(f"the run {run_id} has no log of {str(part)[:80]!r}; {has}")
        return tail(known[part], lines)

    def metrics(self, run_id: str) -> Rows:
        """One row a step."""
        return read_metrics(Path(self._row(run_id).folder))

    def results(self, run_id: str) -> dict[str, Any]:
        """run_id, state, reason, final_metrics, history (at most 50 rows), report (before and after, or None),
        report_path, checkpoint (the last) and model_path (text, or None while there is none), which
        `load_model` loads."""
        return results(self.get(run_id))

    def watch(self, run_id: str, every_s: float = 0.5) -> Iterator[Run]:
        """The run now, and again whenever something about it has changed, until it has ended."""
        last: Run | None = None
        while True:
            run = self.get(run_id)
            if run != last:
                yield run
            if not run.is_active:
                return
            last = run
            time.sleep(every_s)

    def _row(self, run_id: str) -> Row:
        self._index.row(run_id)
        reconcile(self._index)
        return self._index.row(run_id)

    def _view(self, row: Row) -> Run:
        return view(self._index, row)

    def _launch(self, run_id: str, folder: Path) -> None:
        """Send the supervisor off: a process of its own session, whose parent it soon is not."""
        (folder / "logs").mkdir(exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name != MARK}
        with (folder / "logs" / "supervisor.log").open("a") as log:
            words = [sys.executable, "-P", "-m", "palestra.runs.supervisor", str(self.home), run_id]
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        if done.returncode:
            reason = f"its supervisor could not be started; see {log.name}"
            self._index.move(run_id, ["pending"], "failed", reason=reason, ended=time.time())
            raise PalestraError(f"run {run_id}: {reason}")


def new_id(index: Index) -> str:
    """Eight letters and digits that no run has; without those that look like others."""
    known = {row.run_id for row in index.rows()}
    while (run_id := "".join(secrets.choice(_LETTERS) for _ in range(8))) in known:
        pass
    return run_id


def _adopt(folder: Path) -> None:
    """A run that was started in a terminal goes on in the background: its own record says with what."""
    import json

    record = json.loads((folder / "run.json").read_text())
    if "env_url" in record:
        raise PalestraError(
            f"{folder.name} is fed by environments elsewhere: palestra train --env-url URL --resume {folder} goes on"
        )
    RunRequest(name=record["name"]).save(folder, Path.cwd())
