"""The tools over the Model Context Protocol, by its official SDK: on stdio, or as a server for many clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS as WITH_SESSIONS
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.core.errors import NotFoundError, PalestraError, StateError, did_you_mean
from palestra.core.files import last_lines, parse_row
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import redact
from palestra.extras.agent_tools.clients import MAX_SESSIONS, Clients, RlTools, call_in_thread
from palestra.extras.agent_tools.tools import EFFECTS, TOOLS
from palestra.servers.web import MIB, Guard, read_body, refusal, refuse, while_connected

_JSON, _JSON_LINES, _TEXT = "application/json", "application/x-ndjson", "text/plain"
KINDS = {
    kind: {"mime_type": mime_type, "description": text}
    for kind, mime_type, text in (
        ("report", _JSON, "held-out results before and after, metrics, transcripts; while it runs, the results so far"),
        ("metrics", _JSON_LINES, "one line a step"),
        ("rollouts", _JSON_LINES, "the latest attempts, one a line: what was said, and how it was scored"),
        ("log", _TEXT, "the last lines of the trainer's log"),
    )
}
LATEST_ROLLOUTS = 50
_LOG_LINES = 200
_TAIL_BYTES = 4_000_000
_SCHEME = "palestra://runs/"
SESSION_HEADER = "Palestra-Session"
_SESSION_ID = re.compile(r"[\w-]{8,64}", re.ASCII)

_ON_STDIO = "stdio"  # one process, one client
_SESSION_IDLE_S = 24 * 3600.0  # who looks at a training every few hours keeps what was selected
_LISTED_RUNS = 25
_END_S = 2.0  # that work in progress gets to end after Ctrl-C
_HINTS = {
    effect: types.ToolAnnotations(
        read_only_hint=effect == "reads",
        destructive_hint=None if effect == "reads" else effect == "stops",
        idempotent_hint=None if effect == "reads" else effect != "starts",
        open_world_hint=effect == "starts",
    )
    for effect in EFFECTS.values()
}
_INSTRUCTIONS = (
    "Train language models by reinforcement learning. rl_list_environments, rl_select_environment, rl_edit_config, "
    "rl_test_inference to see whether a model can do the task at all, rl_start_training; then rl_check_status now and "
    "then, and rl_get_results at the end. A training goes on when you disconnect."
)

Context = Any  # the SDK's ServerRequestContext, whose type parameters say nothing here


def read_resource(tools: RlTools, run_id: str, kind: str) -> tuple[str, str]:
    """(MIME type, text) of one kind for one run."""
    if kind not in KINDS:
        raise NotFoundError(f"there is no {kind[:100]!r} of a run; expected one of {', '.join(KINDS)}")
    results = tools.rl_get_results(run_id)
    if "run_id" not in results:
        raise StateError(results["error"])
    folder = RunFolder(tools.manager.get(run_id).folder)
    file = {"report": folder.report_file, "metrics": folder.metrics_file}.get(kind)
    if kind == "rollouts":
        lines = last_lines(folder.rollouts_file, LATEST_ROLLOUTS + 1, _TAIL_BYTES)
        # not cut at its start by the tail, nor at its end because it is being written
        whole = [line for line in lines if parse_row(line.encode()) is not None]
        text = "".join(f"{line}\n" for line in whole[-LATEST_ROLLOUTS:])
    elif file is None:
        text = "\n".join(tools.manager.logs(run_id, "trainer", _LOG_LINES))
    elif file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    else:
        text = json.dumps(results, indent=1) if kind == "report" else ""
    return KINDS[kind]["mime_type"], redact(text)


def make_server(clients: Clients) -> Server[Any]:
    """A server of the ten tools, and of the runs' resources."""

    def tools_of(ctx: Context) -> RlTools:
        request = ctx.request
        return clients.session(_ON_STDIO if request is None else request.headers.get("mcp-session-id", _ON_STDIO))

    async def list_tools(ctx: Context, params: Any) -> types.ListToolsResult:
        described = [
            types.Tool(
                name=t.name, description=t.description, input_schema=t.parameters, annotations=_HINTS[EFFECTS[t.fn]]
            )
            for t in TOOLS.values()
        ]
        return types.ListToolsResult(tools=described)

    async def call_tool(ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        loop = asyncio.get_running_loop()

        def progress(done: float, total: float, text: str) -> None:
            asyncio.run_coroutine_threadsafe(ctx.session.report_progress(done, total, text), loop)

        answer = await call_in_thread(tools_of(ctx), params.name, params.arguments, progress)
        text = types.TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))
        # the error of a run that failed comes with its status, and is no refusal
        is_error = "error" in answer and "status" not in answer
        return types.CallToolResult(content=[text], structured_content=answer, is_error=is_error)

    async def list_resources(ctx: Context, params: Any) -> types.ListResourcesResult:
        runs, _ = await asyncio.to_thread(tools_of(ctx).manager.page, _LISTED_RUNS)
        rows = [
            types.Resource(uri=f"{_SCHEME}{run.run_id}/{kind}", name=f"{run.name} ({run.run_id}): {kind}", **about)
            for run in runs
            for kind, about in KINDS.items()
        ]
        return types.ListResourcesResult(resources=rows)

    async def list_templates(ctx: Context, params: Any) -> types.ListResourceTemplatesResult:
        uri = _SCHEME + "{run_id}/"
        rows = [types.ResourceTemplate(uri_template=uri + kind, name=kind, **about) for kind, about in KINDS.items()]
        return types.ListResourceTemplatesResult(resource_templates=rows)

    async def read(ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        run_id, _, kind = uri.removeprefix(_SCHEME).partition("/")
        try:
            if not uri.startswith(_SCHEME):
                raise NotFoundError(f"there is no resource {uri[:200]!r}; they look like {_SCHEME}RUN_ID/report")
            mime_type, text = await asyncio.to_thread(read_resource, tools_of(ctx), run_id, kind)
        except PalestraError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        content = types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)
        return types.ReadResourceResult(contents=[content])

    return Server(
        "palestra",
        version=version("palestra"),
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read,
    )


def run_stdio(server: Server[Any]) -> None:
    """Serve the one client that has started this process until it closes stdin, or Ctrl-C.

    It has a thread of its own: a read of stdin cannot be interrupted, and the interpreter cannot end around one.
    """
    from mcp.server.stdio import stdio_server

    async def serve_stdio() -> None:
        async with stdio_server() as (reads, writes):
            await server.run(reads, writes, server.create_initialization_options())

    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_stdio())

    def serve() -> None:
        with contextlib.suppress(BaseException):  # the task keeps it
            loop.run_until_complete(task)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)  # stops what tools have under way
        thread.join(_END_S)
        sys.stderr.write("Stopped.\n")
        sys.stderr.flush()
        os._exit(130)
    task.result()


def http_app(clients: Clients, token: str | None, dashboard: ASGIApp | None = None) -> ASGIApp:
    """MCP at /mcp over streamable HTTP and POST /tools/NAME, behind the guard. The dashboard guards itself."""

    async def tool(request: Request) -> Response:
        """One call, for clients without MCP. The header names the session, whose selection and edits are its own."""
        client = request.headers.get(SESSION_HEADER) or secrets.token_urlsafe(16)
        name, body = request.path_params["name"], await request.body()
        if not _SESSION_ID.fullmatch(client):
            raise refuse(400, f"{SESSION_HEADER} takes 8 to 64 letters, digits, - and _; without it, you get a new one")
        if name not in TOOLS:
            raise refuse(404, f"there is no tool {name[:100]!r}.{did_you_mean(name[:100], TOOLS)}")
        try:
            arguments = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            raise refuse(400, "the body is not JSON; send the arguments as a JSON object") from None
        result = await while_connected(request, call_in_thread(clients.session(client), name, arguments))
        return JSONResponse(result, headers={SESSION_HEADER: client})

    mcp_app = make_server(clients).streamable_http_app(
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        session_idle_timeout=_SESSION_IDLE_S,
        max_sessions=MAX_SESSIONS,
        custom_starlette_routes=[Route("/tools/{name}", tool, methods=["POST"])],
    )
    mcp_app.add_exception_handler(HTTPException, _refused)
    guarded = Guard(RequireSessions(mcp_app, 4 * MIB), token)
    if dashboard is None:
        return guarded
    to_page = Route("/dashboard", lambda request: RedirectResponse("dashboard/"))
    routes = [to_page, Mount("/dashboard", dashboard), Mount("/", guarded)]
    lifespan: Any = mcp_app.router.lifespan_context  # that of a mounted application does not run by itself
    return Starlette(routes=routes, lifespan=lambda app: lifespan(mcp_app))


def _refused(request: Request, error: Any) -> JSONResponse:
    return JSONResponse({"error": str(error.detail)}, error.status_code)


@dataclass(slots=True)
class RequireSessions:
    """Reads a body of limited size before the SDK's application, and keeps clients to protocol versions with sessions.

    The newest version has no sessions over HTTP, and what a client has selected and edited is its own. A client that
    asks for it gets an error that lists the supported versions, and falls back to one of them.
    """

    app: ASGIApp
    limit: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await read_body(request, self.limit)
        except HTTPException as error:
            await refusal(error.status_code, error.detail)(scope, receive, send)
            return
        requested = request.headers.get("mcp-protocol-version")
        if requested is not None and requested not in WITH_SESSIONS:
            await _unsupported(requested, body)(scope, receive, send)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        await self.app(scope, replay, send)


def _unsupported(requested: str, body: bytes) -> JSONResponse:
    request_id = None
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        request_id = json.loads(body).get("id")
    error = {
        "code": types.UNSUPPORTED_PROTOCOL_VERSION,
        "message": "this server keeps what each client has selected, so it needs a protocol version with sessions",
        "data": {"supported": list(WITH_SESSIONS), "requested": requested},
    }
    return JSONResponse({"jsonrpc": "2.0", "id": request_id, "error": error}, 400)
