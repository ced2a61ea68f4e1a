"""Work that takes longer than a request: in a thread each, with progress, cancelled by the client that asked."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core import children
from palestra.core.errors import SettingError, text_of
from palestra.core.secrets import own_environment, redact
from palestra.extras.dashboard.answers import Event, answer, events
from palestra.runs.request import PALESTRA
from palestra.servers.web import refuse

_MAX_JOBS = 50  # that are remembered
_MAX_RUNNING = 4
_POLL_S = 0.2
_COMPLAINTS = 2000  # characters of what a program wrote before it failed

Work = Callable[["Job"], Any]


@dataclass
class Job:
    """One piece of work. Only its own thread writes to it."""

    kind: str
    title: str
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    state: str = "running"
    progress: dict[str, Any] = field(default_factory=lambda: {"done": 0, "total": 0, "message": ""})
    result: Any = None
    error: str | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def advance(self, done: float, total: float, message: str) -> None:
        self.progress = {"done": done, "total": total, "message": message}

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cancelled"}

    def run(self, work: Work) -> None:
        try:
            self.result = work(self)
            self.state = "cancelled" if self.cancelled.is_set() else "done"
        except Exception as error:
            self.error = redact(text_of(error))
            self.state = "cancelled" if self.cancelled.is_set() else "failed"


class Jobs:
    """The jobs of this server, the newest ones."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, kind: str, title: str, work: Work) -> Job:
        job = Job(kind, title)
        with self._lock:
            if sum(each.state == "running" for each in self._jobs.values()) >= _MAX_RUNNING:
                raise refuse(429, f"{_MAX_RUNNING} jobs are running; wait for one, or cancel it", retry_after_s=5)
            self._jobs[job.id] = job
            ended = [each.id for each in self._jobs.values() if each.state != "running"]
            for old in ended[: max(0, len(self._jobs) - _MAX_JOBS)]:
                del self._jobs[old]
        threading.Thread(target=job.run, args=(work,), name=f"palestra-{kind}", daemon=True).start()
        return job

    def close(self) -> None:
        for job in list(self._jobs.values()):
            job.cancelled.set()

    def routes(self) -> list[Route]:
        return [
            Route("/api/jobs/{job}", lambda request: answer(self._find(request).to_dict()), methods=["GET"]),
            Route("/api/jobs/{job}", self._cancel, methods=["DELETE"]),
            Route("/api/jobs/{job}/events", self._events, methods=["GET"]),
        ]

    def _find(self, request: Request) -> Job:
        job = self._jobs.get(request.path_params["job"])
        if job is None:
            raise refuse(404, "there is no such job; it may have been forgotten")
        return job

    def _cancel(self, request: Request) -> Response:
        job = self._find(request)
        job.cancelled.set()
        return answer(job.to_dict())

    async def _events(self, request: Request) -> Response:
        return events(_follow(self._find(request)))


async def _follow(job: Job) -> AsyncIterator[Event]:
    last = None
    while True:
        if (current := job.to_dict()) != last:
            yield "job", current
            last = current
        if current["state"] != "running":
            return
        await asyncio.sleep(_POLL_S)


def command(words: Sequence[str]) -> Work:
    """A command of ours as work: its last line on stdout is its result. Code of users runs there, not here."""

    def work(job: Job) -> Any:
        child = children.start([*PALESTRA, *words], env=own_environment())
        try:
            while True:
                try:
                    out, complaints = child.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if job.cancelled.is_set():
                        return None
        finally:
            children.end(child, terminate_s=2.0)
        if child.returncode:
            text = complaints.strip()[-_COMPLAINTS:]
            raise SettingError(text.rpartition("Error: ")[2] or f"it ended with exit code {child.returncode}")
        return json.loads(out.strip().splitlines()[-1])

    return work
