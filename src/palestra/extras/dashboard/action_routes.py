"""Routes that change something: start, stop, resume, delete; export, re-score and tests of environments as jobs."""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core import children
from palestra.core.errors import SettingError, StateError, text_of
from palestra.core.files import folder_size
from palestra.core.secrets import own_environment, redact
from palestra.extras.dashboard.answers import Event, answer, events
from palestra.extras.dashboard.catalog import Catalog, CatalogRun, actions, summary
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.runs.request import PALESTRA
from palestra.servers.web import Form, SubjectBody, TestBody, read_model, refuse

Launcher = Any  # agent_tools.launcher.FormLauncher, which is another extra


class ResumeBody(Form):
    max_steps: int | None = Field(None, ge=1)


class ExportBody(Form):
    format: Literal["hf", "gguf"] = "hf"
    checkpoint: str | None = Field(None, pattern=r"^(best|last|\d+)$")


class RescoreBody(Form):
    measures: str
    kind: str = Field("train", pattern=r"^(train|before|after|\d+)$")
    limit: int | None = Field(None, ge=1)


def _post(path: str, form: type[Any], act: Callable[[Request, Any], Any], status: int = 200) -> Route:
    """A route whose body is a form. Its handler runs in a thread: a stop waits, a form asks a process."""

    async def handler(request: Request) -> Response:
        return answer(await asyncio.to_thread(act, request, await read_model(request, form)), status)

    return Route(path, handler, methods=["POST"])


class ActionRoutes:
    """Handlers that change something."""

    def __init__(self, catalog: Catalog, jobs: Jobs, launcher: Launcher) -> None:
        self._catalog = catalog
        self._jobs = jobs
        self._launcher = launcher

    def routes(self) -> list[Route]:
        run, launcher = "/api/runs/{run}", self._launcher
        return [
            Route("/api/environments", lambda request: answer(launcher.environments()), methods=["GET"]),
            Route("/api/environment", lambda asked: answer(launcher.environment(asked.query_params.get("name", "")))),
            _post("/api/form", SubjectBody, lambda request, body: launcher.form(body)),
            _post("/api/form/check", SubjectBody, lambda request, body: {"errors": launcher.check(body)}),
            _post("/api/runs", SubjectBody, lambda request, body: self._summary(launcher.start(body).run_id), 201),
            _post("/api/environments/test", TestBody, self.test, 202),
            _post(f"{run}/stop", Form, self.stop),
            _post(f"{run}/resume", ResumeBody, self.resume),
            _post(f"{run}/export", ExportBody, self.export, 202),
            _post(f"{run}/rescore", RescoreBody, self.rescore, 202),
            Route(run, self.delete, methods=["DELETE"]),
        ]

    def _summary(self, run_id: str) -> Any:
        return {"run": summary(self._catalog.get(run_id))}

    def stop(self, request: Request, body: Form) -> Any:
        return self._summary(self._catalog.manager.stop(self._allowed(request, "stop").id, wait_s=0.0).run_id)

    def resume(self, request: Request, body: ResumeBody) -> Any:
        entry = self._allowed(request, "resume")
        return self._summary(self._catalog.manager.resume(entry.id, max_steps=body.max_steps).run_id)

    def delete(self, request: Request) -> Response:
        entry = self._allowed(request, "delete")
        self._catalog.manager.remove(entry.id, keep_folder=request.query_params.get("keep_folder") == "1")
        return answer({"deleted": entry.id})

    def export(self, request: Request, body: ExportBody) -> Any:
        entry = self._allowed(request, "export")
        word = f"{entry.folder.path}@{body.checkpoint}" if body.checkpoint else str(entry.folder.path)
        export = command(["export", word, "--to", body.format, "--json"])

        def work(job: Job) -> Any:
            made = export(job)
            if not made:
                return None
            path = Path(made["path"])
            names = [path.name] if path.is_file() else sorted(each.name for each in path.iterdir())
            return {**made, "files": names, "bytes": path.stat().st_size if path.is_file() else folder_size(path)}

        return self._jobs.start("export", f"{entry.run.name} as {body.format}", work).started

    def rescore(self, request: Request, body: RescoreBody) -> Any:
        entry = self._allowed(request, "rescore")
        measures = str(self._launcher.code_file(body.measures))
        words = ["rescore", str(entry.folder.path), "--measures", measures, "--kind", body.kind, "--json"]
        words += ["--limit", str(body.limit)] if body.limit else []
        words += self._catalog.trust_words
        score = command(words)

        def work(job: Job) -> Any:
            made = score(job)
            rows = RolloutIndex(entry.folder).rows_of(body.kind) if made and made["changed"] else []
            for change in made["changed"] if made else ():
                number = change["number"]
                change["rollout"] = rows[number] if number < len(rows) else None
            return made

        return self._jobs.start("rescore", entry.run.name, work).started

    def test(self, request: Request, body: TestBody) -> Any:
        test = self._launcher.test
        return self._jobs.start(
            "test", str(body.environment), lambda job: test(body, job.advance, job.cancelled)
        ).started

    def _allowed(self, request: Request, action: str) -> CatalogRun:
        entry = self._catalog.get(request.path_params["run"])
        if action not in actions(entry):
            raise StateError(f"the run {entry.id} is {entry.run.state}, and cannot {action} now")
        return entry


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

    @property
    def started(self) -> dict[str, Any]:
        """The answer to the request that started it."""
        return {"job": self.to_dict()}

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
            Route("/api/jobs/{job}/events", lambda request: events(_follow(self._find(request))), methods=["GET"]),
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
