"""`python -m palestra.runs.supervisor HOME RUN_ID`: the process that supervises one run.

It detaches from its starter, waits in the queue, starts the run's processes one after the other as each becomes
ready, writes their logs, watches them, and ends them in order. If it dies, the kernel sends SIGTERM to its processes,
and every reader of the run's record sees that it has died.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from palestra.core.errors import PalestraError, ResourceError, ServiceError
from palestra.core.files import last_rows
from palestra.core.machine import port_error
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import hide_environment, redact
from palestra.runs.index import ACTIVE, PARTS, Index, PartRow, State, UnknownRun
from palestra.runs.limits import Places
from palestra.runs.processes import Part, Process, descendants, end_all, processes_of_run, send, spawn, this_process
from palestra.runs.reader import why_it_ended
from palestra.runs.request import (
    READY_S,
    LaunchStep,
    RunRequest,
    has_all_batches,
    launch_steps,
    launch_token,
    process_environment,
)

_TICK_S = 0.1
_LOOK_S = 1.0  # between two searches for new processes
_TOUCH_S = 60.0  # between two signs of life for readers on other machines
_LAST_POSTS_S = 10.0  # what an environment posted before it ended may still be on its way to the trainer
_TERMINATE_S = {"env": 10.0, "trainer": 30.0, "api": 10.0}
_STEPS = 3  # the trainer finishes its step and saves a checkpoint: it may also take as long as that many steps took
_FIRST_STEP_S = 120.0  # … while no step says how long one takes
_MAX_TERMINATE_S = 600.0
_TERMINATE_ORPHANS_S = 0.5
_RETRY_S = 1.0
_LOG_S = 2.0
_PORTS = range(20_000, 30_000)  # below the range from which systems choose the ports of outgoing connections

T = TypeVar("T")


class Stopped(Exception):
    """The run was asked to end."""


class TrainingCompleted(Exception):
    """The trainer has finished its last step."""


class Supervisor:
    """One run, from the queue to its end."""

    def __init__(self, index: Index, run_id: str) -> None:
        self._index, self._run_id = index, run_id
        self._row = row = index.row(run_id)  # as last written; written again if the record is lost
        self._folder, self._launched = RunFolder(Path(row.folder)), row.launched
        self._places = Places(index.path.parent, run_id, row.launched, row.gpus)
        self._request = RunRequest.load(self._folder.request_file)
        self._token: str | None = None
        self._parts: dict[str, Part] = {}
        self._descendants: set[Process] = set()  # seen so far: they are ended also if their parent was killed
        self._last_look = self._last_touch = self._env_ended = 0.0
        self._stop_requested = False

    def run(self) -> None:
        """Run to the end; the index has the final state when this returns."""
        end: State
        reason: str | None
        try:
            self._start()
            while True:
                self._tick()
        except TrainingCompleted:
            end, reason = "completed", None
        except Stopped as stopped:
            end, reason = "stopped", str(stopped) or None
        except PalestraError as error:
            end, reason = "failed", redact(str(error))
        except Exception as error:
            print(redact(traceback.format_exc()), flush=True)
            end, reason = "failed", redact(f"the supervisor failed: {type(error).__name__}: {error}")
        if end != "completed":  # so that the reason can be read while the trainer saves its step
            self._move(ACTIVE, "stopping", reason=reason)
        self._end_parts()
        print(f"{end}{f': {reason}' if reason else ''}", flush=True)
        self._move(ACTIVE, end, reason=reason, ended=time.time())

    def _move(self, come_from: Sequence[State], to: State, **values: Any) -> None:
        if self._retry(lambda: self._index.move(self._run_id, come_from, to, of_launch=self._launched, **values)):
            self._row = self._row.model_copy(update={"state": to, **values})

    def _update(self, **values: Any) -> None:
        self._row = self._row.model_copy(update=values)
        self._retry(lambda: self._index.update(self._run_id, **values))

    def _retry(self, call: Callable[[], T]) -> T | None:
        """Read or write the record until its lock is free and the disk has room; None if the run's folder is gone."""
        while self._folder.path.is_dir():
            try:
                try:
                    return call()
                except UnknownRun:  # the record is lost or damaged
                    self._index.write(self._row)
            except OSError as error:
                print(f"the run's record cannot be written: {error}", flush=True)
                time.sleep(_RETRY_S)
        return None

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True

    def _start(self) -> None:
        """Wait in the queue, then start the run's processes one after the other."""
        while (wait := self._places.take()) is not None:
            if wait != self._row.reason:
                self._move(["pending"], "pending", reason=wait)
            self._tick()
        self._move(["pending"], "starting", reason=None)
        self._token = launch_token(self._request, self._folder)
        for step in launch_steps(self._request, self._folder, self._claim_port, self._token):
            self._tick()  # raises if the run was stopped: then nothing more is started
            self._spawn(step)
            until = time.monotonic() + READY_S
            while not step.is_ready():
                self._tick()
                if time.monotonic() > until:
                    raise ServiceError(f"{step.part} was not ready within {READY_S:.0f} s; see its log")
        self._move(["starting"], "running", started=time.time())

    def _claim_port(self, part: str) -> int:
        """A free loopback port that no other run has claimed."""
        for port in random.sample(_PORTS, len(_PORTS)):
            if port_error(port) is None and self._places.lock(f"port-{port}"):
                self._update(ports=self._row.ports | {part: port})
                return port
        raise ResourceError(f"no loopback port from {_PORTS[0]} to {_PORTS[-1]} is free")

    def _spawn(self, step: LaunchStep) -> None:
        command, log = step.command(), self._folder.log_file(step.part)
        print(f"{step.part}: {' '.join(command)}", flush=True)
        environ = process_environment(step.part, self._run_id, self._request, self._token)
        environ["PALESTRA_HOME"] = str(self._index.path.parent)
        devices = self._places.devices
        if devices and ":" not in str(self._request.settings.get("model.device")):  # not one chosen by its number
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        cwd = Path(self._request.cwd) if self._request.cwd else self._folder.path
        locks = self._places.locks if step.part == "trainer" else ()  # a GPU is free when the trainer has ended, too
        self._parts[step.part] = spawn(command, log, environ, cwd if cwd.is_dir() else self._folder.path, locks)
        self._write_parts()

    def _write_parts(self) -> None:
        parts = {name: PartRow(part.process, part.popen.returncode) for name, part in self._parts.items()}
        self._update(parts=parts)

    def _tick(self) -> None:
        """Collect ended processes, and raise if the run must end."""
        now = time.monotonic()
        if now - self._last_look > _LOOK_S:
            self._descendants.update(descendants(os.getpid()))
            self._last_look = now
        if now - self._last_touch > _TOUCH_S:
            self._retry(lambda: os.utime(self._folder.index_file))
            self._last_touch = now
        self._row = self._retry(lambda: self._index.row(self._run_id)) or self._row
        self._reap()
        if self._stop_requested:
            raise Stopped("its supervisor got SIGTERM")
        if self._row.state not in ("pending", "starting", "running") or not self._folder.path.is_dir():
            raise Stopped
        for name, part in self._parts.items():
            if part.popen.returncode is not None:
                self._on_exit(name, part.popen.returncode)
        time.sleep(_TICK_S)

    def _reap(self) -> None:
        for name, part in self._parts.items():
            if part.popen.returncode is None and (code := part.popen.poll()) is not None:
                self._write_parts()
                print(f"{name}: ended with {code}", flush=True)
                self._end_orphans()
                part.log_writer.join(_LOG_S)  # the log may say why it ended

    def _on_exit(self, part: str, code: int) -> None:
        """What the end of a process means for the run."""
        if part == "trainer" and code == 0:
            raise TrainingCompleted
        if part == "env" and has_all_batches(self._folder, self._row.ports["api"], self._token):
            return
        if part == "env" and code == 0:
            self._env_ended = self._env_ended or time.monotonic()
            if time.monotonic() - self._env_ended < _LAST_POSTS_S:
                return
            raise ServiceError("the environment ended before the training did; its log may say why")
        is_atropos = part == "env" and self._request.dialect == "atropos"
        raise ServiceError(why_it_ended(part, code, self._folder.log_file(part), packages=is_atropos))

    def _end_parts(self) -> None:
        """End environment, trainer and API in this order, each with all that it has started: SIGTERM, then SIGKILL."""
        for name in filter(self._parts.__contains__, reversed(PARTS)):
            part, began = self._parts[name], time.monotonic()
            if part.popen.returncode is None:
                send(part.process, signal.SIGTERM)
            while part.popen.returncode is None:
                self._reap()
                waited_s = time.monotonic() - began
                if waited_s > self._patience_s(name) and not (self._is_saving() and waited_s < _MAX_TERMINATE_S):
                    send(part.process, signal.SIGKILL)
                time.sleep(_TICK_S)
        self._end_orphans()

    def _patience_s(self, part: str) -> float:
        """How long a process may take to end: a trainer is in the middle of a step, which may be a long one."""
        if part != "trainer" or not self._folder.has_begun:
            return _TERMINATE_S[part]
        rows = [row for row in last_rows(self._folder.metrics_file) if "train_seconds" in row]
        if not rows:
            return _FIRST_STEP_S
        return min(_MAX_TERMINATE_S, _TERMINATE_S[part] + _STEPS * max(row["train_seconds"] for row in rows))

    def _is_saving(self) -> bool:
        """Whether a checkpoint is being written; one that a killed trainer left unfinished does not grow."""
        try:
            files = [path for folder in self._folder.partial_checkpoints() for path in folder.iterdir()]
            newest = max((path.stat().st_mtime for path in files), default=0.0)
        except OSError:  # it was finished in the meantime
            return True
        return time.time() - newest < _TERMINATE_S["trainer"]

    def _end_orphans(self) -> None:
        """End processes of the run whose starter has ended."""
        alive = [part.process for part in self._parts.values() if part.popen.returncode is None]
        known = {below.pid for process in alive for below in (process, *descendants(process.pid))}
        started = {*self._descendants, *processes_of_run(self._run_id)}
        end_all([process for process in started if process.pid not in known], _TERMINATE_ORPHANS_S)


def main(home: str, run_id: str) -> None:
    """Detach from the starter, then supervise the run to its end."""
    if os.fork():
        os._exit(0)
    hide_environment()
    os.setsid()
    index, me = Index(Path(home)), this_process()
    index.update(run_id, pid=me.pid, born=me.born)
    supervisor = Supervisor(index, run_id)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, supervisor.request_stop)
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # not SIG_IGN, which the run's processes would inherit
    supervisor.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
