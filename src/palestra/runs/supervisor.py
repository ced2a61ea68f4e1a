"""`python -m palestra.runs.supervisor HOME RUN_ID`: the process that looks after one run.

It detaches from whoever started it, waits its turn, starts the run's processes one after the other as each gets
ready, watches them, and ends them in order. Above it stands a guard that does nothing but wait: should the
supervisor die, the guard ends what it leaves behind and says so in the index.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

from palestra.core.errors import PalestraError
from palestra.core.secrets import redact
from palestra.runs import limits, plan
from palestra.runs.explain import redact_logs, why
from palestra.runs.index import ACTIVE, Index, State
from palestra.runs.processes import Process, adopt_orphans, end_all, family, reap, send, spawn, this_process
from palestra.runs.recovery import reconcile, recover
from palestra.runs.request import RunRequest

_TICK_S = 0.1
_BEAT_S = 1.0
_LOOK_S = 3.0
_LAST_POSTS_S = 10.0  # what an environment posted before it ended may still be on its way to the trainer
_PATIENCE_S = {"env": 10.0, "trainer": 30.0, "api": 10.0}  # the trainer finishes its step, and saves it
_STRAYS_S = 0.5
_CHECKPOINT_S = 600.0  # … and is not cut off while it writes a large one


class Stopped(Exception):
    """Somebody wants the run to end."""


class Completed(Exception):
    """The trainer has done its last step."""


class Supervisor:
    """One run, from its turn to its end."""

    def __init__(self, index: Index, run_id: str) -> None:
        self._index, self._run_id = index, run_id
        row = index.row(run_id)
        self._folder, self._launched = Path(row.folder), row.launched
        self._request, self._cwd = RunRequest.load(self._folder)
        self._guard = os.getppid()
        self._parts: dict[str, Process] = {}
        self._codes: dict[str, int] = {}
        self._beaten = self._env_ended = 0.0
        self._asked_to_end = False

    def run(self) -> None:
        """The whole life of the run; its end is in the index when this returns."""
        end: State
        reason: str | None
        try:
            self._wait_for_turn()
            self._start()
            while True:
                self._tick()
        except Completed:
            end, reason = "completed", None
        except Stopped as stopped:
            end, reason = "stopped", str(stopped) or None
        except PalestraError as error:
            end, reason = "failed", redact(str(error))
        except Exception as error:
            traceback.print_exc()
            end, reason = "failed", redact(f"the supervisor failed: {type(error).__name__}: {error}")
        if end != "completed":  # what is known is said at once: a trainer may take its time to save its step
            self._index.move(self._run_id, ACTIVE, "stopping", of_launch=self._launched, reason=reason)
        self._end_parts()
        redact_logs(self._folder)
        print(f"{end}{f': {reason}' if reason else ''}", flush=True)
        self._index.move(self._run_id, ACTIVE, end, of_launch=self._launched, reason=reason, ended=time.time())

    def ask_to_end(self, number: int, frame: FrameType | None) -> None:
        self._asked_to_end = True

    def _wait_for_turn(self) -> None:
        gpus, runs = limits.count_gpus(), limits.default_max_runs()
        looked = time.monotonic()
        while True:
            self._tick()
            if self._index.admit(self._run_id, limits.free_memory_gib(), gpus, runs) is None:
                return
            if time.monotonic() - looked > _LOOK_S:  # a dead run before this one would be waited for without end
                reconcile(self._index)
                looked = time.monotonic()

    def _start(self) -> None:
        for step in plan.plan(self._request, self._folder, lambda part: self._index.claim_port(self._run_id, part)):
            self._tick()  # the last look before anything is started: a run that shall stop starts nothing more
            self._spawn(step)
            until = time.monotonic() + step.ready_within_s
            while not step.is_ready():
                self._tick()
                if time.monotonic() > until:
                    raise PalestraError(f"{step.part} was not ready within {step.ready_within_s:.0f} s; see its log")
        self._index.move(self._run_id, ["starting"], "running", started=time.time())

    def _spawn(self, step: plan.Step) -> None:
        log = plan.logs(self._folder, [step.part])[step.part]
        command = step.command()
        print(f"{step.part}: {' '.join(command)}", flush=True)
        process = spawn(command, log, plan.environment_of(step.part, self._run_id), self._cwd)
        self._parts[step.part] = process
        self._index.part_started(self._run_id, step.part, process)

    def _tick(self) -> None:
        """A moment's watch: heartbeat, who has ended, and whether the run shall go on."""
        now = time.time()
        if now - self._beaten > _BEAT_S or now < self._beaten:
            self._index.update(self._run_id, heartbeat=now)
            self._beaten = now
        self._reap()
        if self._asked_to_end:
            raise Stopped("its supervisor was asked to end (SIGTERM)")
        if os.getppid() != self._guard:
            raise PalestraError("the guard of its supervisor has died")
        if self._index.row(self._run_id).state not in ("pending", "starting", "running"):
            raise Stopped
        for part, code in self._codes.items():
            self._judge(part, code)
        time.sleep(_TICK_S)

    def _reap(self) -> None:
        ended = reap()
        for part, process in self._parts.items():
            if process.pid in ended:
                code = self._codes[part] = ended[process.pid]
                self._index.part_ended(self._run_id, part, code)
                print(f"{part}: ended with {code}", flush=True)
                self._sweep()

    def _judge(self, part: str, code: int) -> None:
        """What the end of a process means for the run."""
        log = plan.logs(self._folder, [part])[part]
        if part == "trainer" and code == 0:
            raise Completed
        if part == "env" and plan.has_all_batches(self._folder, self._index.ports(self._run_id)["api"]):
            return
        if part == "env" and code == 0:
            self._env_ended = self._env_ended or time.monotonic()
            if time.monotonic() - self._env_ended < _LAST_POSTS_S:
                return
            raise PalestraError("the environment ended before the training did; its log may say why")
        raise PalestraError(why(part, code, log))

    def _end_parts(self) -> None:
        """Environment, trainer, API: each asked, waited for, then made to end, with all that it has started."""
        for part in plan.STOP_ORDER:
            process = self._parts.get(part)
            if process is None or part in self._codes:
                continue
            began, patience_s = time.monotonic(), _PATIENCE_S[part]
            send(process, signal.SIGTERM)
            while part not in self._codes:
                self._index.update(self._run_id, heartbeat=time.time())
                self._reap()
                waited_s = time.monotonic() - began
                if waited_s > patience_s and not (self._is_saving() and waited_s < _CHECKPOINT_S):
                    send(process, signal.SIGKILL)
                time.sleep(_TICK_S)
        self._sweep()

    def _is_saving(self) -> bool:
        """Whether a checkpoint is growing; one that a killed trainer left half done does not."""
        try:
            files = self._folder.glob("checkpoints/.step-*.partial/*")
            newest = max((path.stat().st_mtime for path in files), default=0.0)
        except OSError:  # it was finished while we looked
            return True
        return time.time() - newest < _PATIENCE_S["trainer"]

    def _sweep(self) -> None:
        """End what a process that has ended left behind."""
        alive = [process.pid for part, process in self._parts.items() if part not in self._codes]
        kept = {pid for root in alive for pid in (root, *(p.pid for p in family(root)))}
        end_all([process for process in family(os.getpid()) if process.pid not in kept], _STRAYS_S)


def guard(index: Index, run_id: str, supervisor: int) -> None:
    """Wait for the supervisor to end; where it did not say so itself, end what is left and say it."""
    launched = index.row(run_id).launched
    pid = status = 0
    while pid != supervisor:
        pid, status = os.waitpid(-1, 0)
    row = index.row(run_id)
    if row.state in ACTIVE and row.launched == launched:
        killed = os.WIFSIGNALED(status)
        recover(index, row, "its supervisor has died" if killed else "its supervisor failed; its log says why")
    end_all(family(os.getpid()), _STRAYS_S)


def main(home: str, run_id: str) -> None:
    """Detach, then fork: the parent is the guard, the child the supervisor."""
    if os.fork():
        os._exit(0)
    os.setsid()
    index = Index(Path(home))
    adopt_orphans()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        guard(index, run_id, child)
        return
    adopt_orphans()
    me = this_process()
    index.update(run_id, pid=me.pid, born=me.born, heartbeat=time.time())
    supervisor = Supervisor(index, run_id)
    signal.signal(signal.SIGTERM, supervisor.ask_to_end)
    signal.signal(signal.SIGINT, supervisor.ask_to_end)
    supervisor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
