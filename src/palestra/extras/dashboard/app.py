"""The dashboard as a web application: the page, its static files and the JSON API, all behind `Access`."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.core.errors import PalestraError
from palestra.extras.dashboard.action_routes import ActionRoutes, Jobs, Launcher
from palestra.extras.dashboard.answers import answer
from palestra.extras.dashboard.catalog import Catalog
from palestra.extras.dashboard.rollout_index import UnknownRollout
from palestra.extras.dashboard.rollout_routes import rollout_routes
from palestra.extras.dashboard.run_routes import RunRoutes
from palestra.runs.index import UnknownRun
from palestra.servers.web import error_body, refusal

# Scripts and styles come from this server alone, so that what a model wrote cannot run even where it is not escaped.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_SAFE = ("GET", "HEAD")


class Access:
    """Checks Origin, Sec-Fetch-Site and the token of every request, and adds the security headers.

    A browser cannot send a token with a link or an EventSource: `?token=…` is exchanged for a cookie once.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope) if scope["type"] == "http" else None
        answer = None if request is None else self._refusal(request) or self._exchange(request)
        await (answer or self._app)(scope, receive, with_headers if request else send)

    def _refusal(self, request: Request) -> Response | None:
        if not _is_own_page(request):
            return refusal(403, "requests of other sites are not answered; open the dashboard itself")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        cookie = request.cookies.get(_cookie_name(request), "")
        if not any(self._is_token(text) for text in (bearer, cookie, _asked(request))):
            return refusal(401, "the token is missing or wrong; open the address that was printed at the start")
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method not in _SAFE and media_type != "application/json":
            return refusal(415, "send Content-Type: application/json")
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _exchange(self, request: Request) -> Response | None:
        """The page without the token in its address, which a history or a screenshot would keep."""
        if request.method != "GET" or not self._is_token(_asked(request)):
            return None
        answer = Response(status_code=303, headers={"Location": "./"})
        path = request.scope.get("root_path") or "/"
        answer.set_cookie(_cookie_name(request), self._token, httponly=True, samesite="strict", path=path)
        return answer


def _is_own_page(request: Request) -> bool:
    """Whether no other site asks. `Sec-Fetch-Site: none` is an address typed or clicked in a mail: it may only read."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return False
    site = request.headers.get("sec-fetch-site", "same-origin")  # programs that are no browsers send none
    return site == "same-origin" or (site == "none" and request.method in _SAFE)


def _cookie_name(request: Request) -> str:
    """One for each port: browsers send a host's cookies to all its ports, and each dashboard has its own token."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"palestra_token_{port if port.isdecimal() and port.isascii() else 80}"


def _asked(request: Request) -> str:
    return request.query_params.get("token", "")


STATIC = Path(__file__).with_name("static")


def dashboard_app(catalog: Catalog, token: str, launcher: Launcher | None = None, path: Path | None = None) -> Access:
    """The application; `path` was opened instead of the index of runs. Without a launcher it is read-only."""
    jobs = Jobs()
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

    app = Starlette(
        routes=[
            Route("/", page, methods=["GET"]),
            Route("/api/status", status, methods=["GET"]),
            *RunRoutes(catalog).routes(),
            *rollout_routes(catalog),
            *changing,
            *jobs.routes(),
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
