"""Routes that change something: start, stop, resume, delete, export, re-score, test an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core.errors import StateError
from palestra.core.files import folder_size
from palestra.extras.dashboard.answers import answer
from palestra.extras.dashboard.catalog import Catalog, CatalogRun
from palestra.extras.dashboard.jobs import Job, Jobs, command
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.extras.dashboard.summaries import actions, summary
from palestra.servers.body import Form, SubjectBody, TestBody, read_model

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


class ActionRoutes:
    """Handlers that change something. Each runs in a thread: a stop waits, a form asks a process."""

    def __init__(self, catalog: Catalog, jobs: Jobs, launcher: Launcher) -> None:
        self._catalog = catalog
        self._jobs = jobs
        self._launcher = launcher

    def routes(self) -> list[Route]:
        run = "/api/runs/{run}"
        return [
            Route("/api/environments", lambda request: answer(self._launcher.environments()), methods=["GET"]),
            Route("/api/environment", self.environment, methods=["GET"]),
            Route("/api/form", self._with(SubjectBody, self.form), methods=["POST"]),
            Route("/api/form/check", self._with(SubjectBody, self.check), methods=["POST"]),
            Route("/api/runs", self._with(SubjectBody, self.start), methods=["POST"]),
            Route("/api/environments/test", self._with(TestBody, self.test), methods=["POST"]),
            Route(f"{run}/stop", self._with(Form, self.stop), methods=["POST"]),
            Route(f"{run}/resume", self._with(ResumeBody, self.resume), methods=["POST"]),
            Route(f"{run}/export", self._with(ExportBody, self.export), methods=["POST"]),
            Route(f"{run}/rescore", self._with(RescoreBody, self.rescore), methods=["POST"]),
            Route(run, self.delete, methods=["DELETE"]),
        ]

    def _with(self, form: type[Any], act: Callable[[Request, Any], Response]) -> Callable[[Request], Any]:
        async def handler(request: Request) -> Response:
            body = await read_model(request, form)
            return await asyncio.to_thread(act, request, body)

        return handler

    def environment(self, request: Request) -> Response:
        return answer(self._launcher.environment(request.query_params.get("name", "")))

    def form(self, request: Request, body: SubjectBody) -> Response:
        return answer(self._launcher.form(body))

    def check(self, request: Request, body: SubjectBody) -> Response:
        return answer({"errors": self._launcher.check(body)})

    def start(self, request: Request, body: SubjectBody) -> Response:
        run = self._launcher.start(body)
        return answer({"run": summary(self._catalog.get(run.run_id))}, 201)

    def stop(self, request: Request, body: Form) -> Response:
        found = self._allowed(request, "stop")
        self._catalog.manager.stop(found.id, wait_s=0.0)
        return answer({"run": summary(self._catalog.get(found.id))})

    def resume(self, request: Request, body: ResumeBody) -> Response:
        found = self._allowed(request, "resume")
        self._catalog.manager.resume(found.id, max_steps=body.max_steps)
        return answer({"run": summary(self._catalog.get(found.id))})

    def delete(self, request: Request) -> Response:
        found = self._allowed(request, "delete")
        self._catalog.manager.remove(found.id, keep_folder=request.query_params.get("keep_folder") == "1")
        return answer({"deleted": found.id})

    def export(self, request: Request, body: ExportBody) -> Response:
        found = self._allowed(request, "export")
        word = f"{found.folder.path}@{body.checkpoint}" if body.checkpoint else str(found.folder.path)
        export = command(["export", word, "--to", body.format, "--json"])

        def work(job: Job) -> Any:
            made = export(job)
            if not made:
                return None
            path = Path(made["path"])
            names = [path.name] if path.is_file() else sorted(each.name for each in path.iterdir())
            return {**made, "files": names, "bytes": path.stat().st_size if path.is_file() else folder_size(path)}

        return answer({"job": self._jobs.start("export", f"{found.run.name} as {body.format}", work).to_dict()}, 202)

    def rescore(self, request: Request, body: RescoreBody) -> Response:
        found = self._allowed(request, "rescore")
        measures = str(self._launcher.code_file(body.measures))
        words = ["rescore", str(found.folder.path), "--measures", measures, "--kind", body.kind, "--json"]
        words += ["--limit", str(body.limit)] if body.limit else []
        words += self._catalog.trust_words
        score = command(words)

        def work(job: Job) -> Any:
            made = score(job)
            rows = RolloutIndex(found.folder).rows_of(body.kind) if made and made["changed"] else []
            for change in made["changed"] if made else ():
                number = change["number"]
                change["rollout"] = rows[number] if number < len(rows) else None
            return made

        return answer({"job": self._jobs.start("rescore", found.run.name, work).to_dict()}, 202)

    def test(self, request: Request, body: TestBody) -> Response:
        def work(job: Job) -> Any:
            return self._launcher.test(body, job.advance, job.cancelled)

        return answer({"job": self._jobs.start("test", str(body.environment), work).to_dict()}, 202)

    def _allowed(self, request: Request, action: str) -> CatalogRun:
        found = self._catalog.get(request.path_params["run"])
        if action not in actions(found):
            raise StateError(f"the run {found.id} is {found.run.state}, and cannot {action} now")
        return found
