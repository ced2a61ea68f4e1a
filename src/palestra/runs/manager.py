"""The run manager: starts, stops, resumes and removes runs, which continue after the caller's process ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palestra.core.errors import StateError
from palestra.core.files import new_folder, open_private, remove_stale
from palestra.core.run_folder import Resume, RunFolder, step_of
from palestra.runs import limits
from palestra.runs.index import ACTIVE, ENDED, Row, State, TooManyRuns, new_id, palestra_home
from palestra.runs.processes import RUN_VARIABLE, holder, send, this_host
from palestra.runs.reader import Part, Run, RunReader, Runs, read_run
from palestra.runs.request import RunRequest

__all__ = ["ACTIVE", "Part", "Run", "RunManager", "RunRequest", "State", "palestra_home"]

_POLL_S = 0.1


class RunManager(RunReader):
    """Reads and changes the runs of one home. Before each change, runs that have died are marked in the index.

    A new run's folder is made in its setting `output_dir`, or in `runs` of the home.
    """

    _writes = True

    def __init__(self, home: Path | None = None, *, max_runs: int | None = None) -> None:
        super().__init__(home)
        self.max_runs = max_runs

    def start(self, request: RunRequest, *, max_active: int | None = None) -> Run:
        """Start a run in the background, or queue it; PalestraError for bad settings or `max_active` active runs."""
        config, needs_wire = request.check(), request.needs_wire()
        gpus = limits.gpus_needed(config.model, limits.count_gpus(), request.nproc)
        self._index.end_dead_runs()
        output_dir = Path(str(request.settings.get("output_dir") or self.home / "runs")).expanduser().absolute()
        name = request.name or request.subject
        folder = RunFolder(new_folder(output_dir, name))
        request.save(folder)
        if needs_wire:
            folder.wire.mkdir()
        now, run_id = time.time(), new_id()
        row: dict[str, Any] = {
            "run_id": run_id, "name": name, "environment": request.subject, "folder": str(folder.path),
            "kind": "managed", "state": "pending", "created": now, "launched": now, "host": this_host(), "gpus": gpus,
        }  # fmt: skip
        try:
            self._index.add(max_active=max_active, **row)
        except TooManyRuns:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise
        self._launch(run_id, folder)
        return self.get(run_id)

    def stop(self, run_id: str, wait_s: float = 60.0, on_wait: Callable[[float], None] = lambda waited_s: None) -> Run:
        """Stop a run after its step, with a checkpoint; wait at most `wait_s`, and call `on_wait` in the meantime."""
        row = self._reconciled(run_id)
        if row.state in ENDED:
            raise StateError(f"the run {run_id} has ended already; it is {row.state}")
        self._index.move(run_id, ["pending", "starting", "running"], "stopping")
        if row.kind == "foreground" and row.supervisor is not None and row.host == this_host():
            send(row.supervisor, signal.SIGTERM)
        began = time.monotonic()
        while self._index.row(run_id).state not in ENDED and (waited_s := time.monotonic() - began) < wait_s:
            on_wait(waited_s)
            time.sleep(_POLL_S)
        return read_run(self._reconciled(run_id))

    def resume(self, run_id: str, *, max_steps: int | None = None) -> Run:
        """Continue a stopped or failed run from its last checkpoint; with more steps, also a completed one."""
        row = self._reconciled(run_id)
        if row.state == "completed" and max_steps is None:
            raise StateError(f"the run {run_id} is complete; to continue it, give it more steps (--max-steps)")
        if row.state not in ENDED:
            raise StateError(f"the run {run_id} is {row.state}; only a stopped or failed run can be resumed")
        folder = RunFolder(Path(row.folder))
        if not folder.request_file.is_file():
            RunRequest.of_run(folder).save(folder)
        request = RunRequest.load(folder.request_file)
        config = folder.config if folder.has_begun else request.config()
        gpus = limits.gpus_needed(config.model, limits.count_gpus(), request.nproc)
        if max_steps is not None:
            if not folder.has_begun:
                raise StateError(f"the run {run_id} had not begun; resume it without --max-steps")
            done = folder.last_checkpoint()
            resume = Resume(folder.path, max_steps=max_steps)
            resume.config(config, 0 if done is None else step_of(done)).save(folder.config_file)
        changes: dict[str, Any] = dict.fromkeys(("reason", "ended", "pid", "born")) | {"parts": {}, "ports": {}}
        changes |= {"kind": "managed", "host": this_host(), "launched": time.time(), "gpus": gpus}
        if not self._index.move(run_id, [row.state], "pending", **changes):
            raise StateError(f"the run {run_id} was just resumed by another process")
        self._launch(run_id, folder)
        return self.get(run_id)

    def adopt(self, folder: RunFolder) -> str:
        """The id of the run in a folder, which is added to the index if it is not listed."""
        row = self.row_of(RunFolder(folder.path.absolute()))
        if not self._index.lists(Path(row.folder)):
            self._index.write(row)
        return row.run_id

    def remove(self, run_id: str, *, keep_folder: bool = False) -> None:
        """Remove a run that has ended from the index, and delete its folder."""
        row = self._reconciled(run_id)
        if not self._index.remove(run_id):
            raise StateError(f"the run {run_id} is {row.state}; stop it first: palestra runs stop {run_id}")
        folder = RunFolder(Path(row.folder))
        if not keep_folder and (folder.request_file.is_file() or folder.has_begun):
            shutil.rmtree(folder.path, ignore_errors=True)

    def gc(self) -> Runs:
        """End and record what dead runs have left behind, remove their temporary folders, and return these runs."""
        remove_stale()
        return [self.get(run_id) for run_id in self._index.end_dead_runs()]

    def _reconciled(self, run_id: str) -> Row:
        self._index.row(run_id)  # an unknown id raises before anything is changed
        self._index.end_dead_runs()
        return self._index.row(run_id)

    def _launch(self, run_id: str, folder: RunFolder) -> None:
        """Start the supervisor, which detaches itself from this process."""
        environ = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        environ |= {limits.MAX_RUNS_VARIABLE: str(self.max_runs)} if self.max_runs else {}
        with open_private(folder.log_file("supervisor")) as log:
            command = [sys.executable, "-P", "-m", "palestra.runs.supervisor", str(self.home), run_id]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )
        if done.returncode:
            reason = f"its supervisor could not be started; see {log.name}"
            self._index.move(run_id, ["pending"], "failed", reason=reason, ended=time.time())
            raise StateError(f"run {run_id}: {reason}")


def run_garbage(run: RunFolder) -> dict[Path, str]:
    """The folders of checkpoints but the newest and the best, and why; none of a run that is being trained."""
    if holder(run.path) is not None:
        return {}
    keep = {run.last_checkpoint(), run.best_checkpoint()}
    older = {path: "an older checkpoint" for path in run.step_checkpoints() if path not in keep}
    return older | dict.fromkeys(sorted(run.checkpoints.glob(".step-*")), "half written")
