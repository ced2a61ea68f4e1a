"""kill -9 of every process of a run, at every kind of moment: what is left, what is said, whether it goes on.

    python benchmarks/run_kills.py                      all 12 cases, each a run of its own
    python benchmarks/run_kills.py trainer checkpoint   one of them

A run on the wire (trajectory API, trainer, environment, and the supervisor above them) is started and one of its
processes is killed: while it starts up, in the middle of a step, or while a checkpoint is written. Nobody looks
until all processes of the run are gone; then its state is asked for, and it is resumed to its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from palestra.core.run_folder import RunFolder, step_of
from palestra.runs.index import ENDED, Index
from palestra.runs.manager import Run, RunManager, RunRequest
from palestra.runs.processes import Process, processes_of_run

VICTIMS = ("supervisor", "trainer", "env", "api")
MOMENTS = ("start-up", "step", "checkpoint")
STEPS = 6
SETTINGS = {
    "train.max_steps": STEPS,
    "train.problems_per_step": 1,
    "train.filter_equal_groups": False,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 24,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 10,
    "eval.cases": 4,
}
ENVIRONMENT = Path(__file__).parents[1] / "examples" / "my_first_env.py"


class Victims:
    """A run whose processes can be waited for and killed."""

    def __init__(self, home: Path, steps: int = STEPS) -> None:
        self.manager, self.index, self.steps = RunManager(home), Index(home), steps
        settings = {**SETTINGS, "train.max_steps": steps}
        self.run_id = self.manager.start(
            RunRequest(environment=str(ENVIRONMENT), settings=settings, wire=True, name="kills")
        ).run_id
        self.folder = RunFolder(Path(self.index.row(self.run_id).folder))

    def process(self, name: str) -> Process | None:
        if name == "supervisor":
            # it lives before it has anything to leave behind: take it when its first child is there
            row = self.index.row(self.run_id)
            return row.supervisor if row.parts else None
        part = self.index.row(self.run_id).parts.get(name)
        return part.process if part is not None and part.exit_code is None else None

    def kill_at(self, victim: str, moment: str) -> None:
        """Wait for the moment, then kill -9."""
        done = len(self.folder.metrics())
        wait: dict[str, Callable[[], Any]] = {
            "start-up": lambda: self.process(victim),
            "step": lambda: len(self.folder.metrics()) > done,
            "checkpoint": lambda: len(self.folder.metrics()) > done + 1 and self.folder.partial_checkpoints(),
        }
        self._wait(wait[moment], f"{victim} at {moment}")
        process = self.process(victim)
        assert process is not None, f"{victim} is not there at {moment}"
        os.kill(process.pid, signal.SIGKILL)

    def wait_until_nobody_is_left(self) -> tuple[float, float]:
        """Seconds until the index says why, and until no process lives; asks it and the system, not the manager."""
        began, told = time.monotonic(), 0.0
        supervisor = self.index.row(self.run_id).supervisor
        while not told or processes_of_run(self.run_id) or (supervisor is not None and supervisor.is_alive):
            assert time.monotonic() - began < 60, f"left behind: {processes_of_run(self.run_id)}"
            told = told or (time.monotonic() - began if self.index.row(self.run_id).reason else 0.0)
            time.sleep(0.02)
        return told, time.monotonic() - began

    def wait_until_ended(self) -> Run:
        self._wait(lambda: not self.manager.get(self.run_id).is_active, "the end")
        return self.manager.get(self.run_id)

    def _wait(self, happened: Callable[[], Any], what: str) -> None:
        until = time.monotonic() + 240
        while not happened():
            row = self.index.row(self.run_id)
            assert row.state not in ENDED or what == "the end", f"{row.state} before {what}: {row.reason}"
            assert time.monotonic() < until, f"no {what}; {row.state}"
            time.sleep(0.005)


def recorded(folder: RunFolder) -> dict[int, Any]:
    """What a run has written down of the steps that its last checkpoint knows of."""
    checkpoint = folder.last_checkpoint()
    last = 0 if checkpoint is None else step_of(checkpoint)
    rollouts: dict[int, list[dict[str, Any]]] = {}
    for rollout in folder.rollouts():
        rollouts.setdefault(rollout["step"], []).append(rollout)
    rows = {int(row["step"]): row for row in folder.metrics()}
    return {step: (rows[step], rollouts[step]) for step in rows if step <= last}


def case(home: Path, victim: str, moment: str) -> dict[str, Any]:
    """One case, with everything that is promised of it asserted."""
    began = time.monotonic()
    run = Victims(home)
    run.kill_at(victim, moment)
    told_s, gone_s = run.wait_until_nobody_is_left()
    before = recorded(run.folder)
    state = run.wait_until_ended()
    assert told_s < 10
    assert gone_s < (10 if victim == "supervisor" else 45)  # a supervisor lets the trainer save its step
    assert state.state == "failed"
    assert state.reason
    run.manager.resume(run.run_id)
    end = run.wait_until_ended()
    assert end.state == "completed", end.reason
    after = recorded(run.folder)
    assert sorted(after) == list(range(1, STEPS + 1))
    assert all(after[step] == row for step, row in before.items())
    return {
        "victim": victim,
        "moment": moment,
        "reason_told_after_s": round(told_s, 2),
        "no_process_left_after_s": round(gone_s, 2),
        "state": state.state,
        "reason": state.reason.splitlines()[0],
        "steps_kept": len(before),
        "resumed_to": end.state,
        "whole_case_s": round(time.monotonic() - began, 1),
    }


def main(victims: list[str], moments: list[str]) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for victim in victims:
            for moment in moments:
                print(json.dumps(case(Path(folder), victim, moment)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:2] or list(VICTIMS), sys.argv[2:3] or list(MOMENTS))
