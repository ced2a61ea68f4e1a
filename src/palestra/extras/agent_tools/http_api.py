"""The tools over plain HTTP, described by OpenAPI: POST /tools/NAME with the arguments as a JSON object."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.applications import Starlette
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from palestra.core.errors import PalestraError
from palestra.extras.agent_tools import resources
from palestra.extras.agent_tools.answers import Answer
from palestra.extras.agent_tools.tools import TOOLS, Clients, RlTool, RlTools, call_in_thread
from palestra.servers.body import MIB, read_body
from palestra.servers.guard import Guard
from palestra.servers.web import while_connected

SESSION_HEADER = "Palestra-Session"
_SESSION_ID = re.compile(r"[\w-]{8,64}", re.ASCII)
_ABOUT = (
    f"What is selected and edited belongs to one session. A first answer names it in the header {SESSION_HEADER}; send "
    "it with the next requests, or choose one of your own. Every answer of a tool is a JSON object; one with `error` "
    "says what to do instead."
)
_EVENTS = "text/event-stream"


def http_app(clients: Clients, token: str | None, dashboard: ASGIApp | None = None) -> ASGIApp:
    """The application, guarded: a token, or a loopback address and no other site. The dashboard guards itself."""
    app = FastAPI(title="Palestra", version=version("palestra"), description=_ABOUT)

    @app.exception_handler(AnyHTTPException)
    async def refused(request: Request, error: AnyHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(PalestraError)
    async def unknown(request: Request, error: PalestraError) -> JSONResponse:
        return JSONResponse({"error": str(error), "code": error.code}, 404)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/tools", summary="The schemas of the tools, for function calling")
    async def tools() -> list[dict[str, Any]]:
        return [tool.schema for tool in TOOLS.values()]

    @app.get("/runs/{run_id}/{kind}", summary="Read of a run: " + ", ".join(resources.KINDS))
    async def read(run_id: str, kind: str) -> Response:
        mime_type, text = await asyncio.to_thread(resources.read_resource, clients.session(""), run_id, kind)
        return Response(text, media_type=mime_type)

    for tool in TOOLS.values():
        _add_tool(app, clients, tool)
    guarded = Guard(app, token)
    if dashboard is None:
        return guarded
    to_page = Route("/dashboard", lambda request: RedirectResponse("dashboard/"))
    return Starlette(routes=[to_page, Mount("/dashboard", dashboard), Mount("/", guarded)])


def _add_tool(app: FastAPI, clients: Clients, tool: RlTool) -> None:
    body = {"content": {"application/json": {"schema": tool.parameters}}, "required": bool(tool.parameters["required"])}

    async def call(
        request: Request, palestra_session: Annotated[str | None, Header(description="see above")] = None
    ) -> Response:
        client = _client(palestra_session)
        session, arguments = clients.session(client), await _arguments(request)
        headers = {SESSION_HEADER: client}
        if _EVENTS in request.headers.get("accept", ""):
            events = _events(session, tool.name, arguments)
            return StreamingResponse(events, media_type=_EVENTS, headers=headers)
        answer = await while_connected(request, call_in_thread(session, tool.name, arguments))
        return JSONResponse(answer, headers=headers)

    app.add_api_route(
        f"/tools/{tool.name}",
        call,
        methods=["POST"],
        operation_id=tool.name,
        summary=tool.description.splitlines()[0],
        response_model=None,
        openapi_extra={"requestBody": body},
    )


def _client(session_id: str | None) -> str:
    if session_id is None:
        return secrets.token_urlsafe(16)
    if not _SESSION_ID.fullmatch(session_id):
        raise HTTPException(
            400, f"{SESSION_HEADER} takes 8 to 64 letters, digits, - and _; leave it out to be given one"
        )
    return session_id


async def _arguments(request: Request) -> Any:
    body = await read_body(request, MIB)
    if not body.strip():
        return {}
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON; send the arguments as a JSON object") from None


async def _events(session: RlTools, name: str, arguments: Any) -> AsyncIterator[str]:
    """`progress` events while the tool works, then one `answer`."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Answer]]()

    def progress(done: float, total: float, text: str) -> None:
        row = {"done": done, "total": total, "message": text}
        loop.call_soon_threadsafe(events.put_nowait, ("progress", row))

    async def work() -> None:
        events.put_nowait(("answer", await call_in_thread(session, name, arguments, progress)))

    task = asyncio.create_task(work())
    try:
        kind = ""
        while kind != "answer":
            kind, data = await events.get()
            yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"
    finally:
        task.cancel()
