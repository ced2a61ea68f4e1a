"""The dashboard as a web application: the page, its static files and the JSON API, all behind `Access`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from palestra.core.errors import PalestraError
from palestra.extras.dashboard.access import Access
from palestra.extras.dashboard.action_routes import ActionRoutes, Launcher
from palestra.extras.dashboard.answers import answer
from palestra.extras.dashboard.catalog import Catalog
from palestra.extras.dashboard.chats import Chats
from palestra.extras.dashboard.jobs import Jobs
from palestra.extras.dashboard.rollout_index import UnknownRollout
from palestra.extras.dashboard.rollout_routes import RolloutRoutes
from palestra.extras.dashboard.run_routes import RunRoutes
from palestra.runs.index import UnknownRun
from palestra.servers.web import error_body

STATIC = Path(__file__).with_name("static")


def dashboard_app(
    catalog: Catalog, token: str, *, launcher: Launcher | None = None, path: Path | None = None
) -> Access:
    """The application; `path` was opened instead of the index of runs. Without a launcher it is read-only."""
    jobs, chats = Jobs(), Chats(catalog)
    changing = [] if launcher is None else ActionRoutes(catalog, jobs, launcher).routes()

    def status(request: Request) -> Response:
        home = {"home": str(catalog.manager.home), "path": None if path is None else str(path)}
        return answer({"version": version("palestra"), **home, "can_start": launcher is not None})

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        jobs.close()
        await asyncio.to_thread(chats.close)

    app = Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/api/status", status, methods=["GET"]),
            *RunRoutes(catalog).routes(),
            *RolloutRoutes(catalog).routes(),
            *changing,
            *jobs.routes(),
            *(chats.routes() if launcher is not None else ()),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((HTTPException, PalestraError, Exception), _failed),
    )
    return Access(app, token)


def app_of_runs(manager: Any, token: str, launcher: Any) -> Access:
    """The dashboard of all runs, for an application that mounts it."""
    return dashboard_app(Catalog(manager), token, launcher=launcher)


async def _failed(request: Request, error: Exception) -> Response:
    is_ours = isinstance(error, PalestraError)
    status = 404 if isinstance(error, UnknownRun | UnknownRollout) else 400 if is_ours else 500
    if isinstance(error, HTTPException):
        status = error.status_code
    body = error_body(status, getattr(error, "detail", error))
    body["error"] |= getattr(error, "more", {})
    return answer(body, status)
