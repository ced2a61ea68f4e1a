"""The tools over the Model Context Protocol, by its official SDK: on stdio, or as a server for many clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from importlib.metadata import version
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.core.errors import PalestraError
from palestra.extras.agent_tools import resources
from palestra.extras.agent_tools.tools import MAX_SESSIONS, TOOLS, Clients, Effect, RlTools, call_in_thread, is_refusal
from palestra.servers.body import MIB, WholeBody
from palestra.servers.guard import Guard

_ON_STDIO = "stdio"  # one process, one client
_SESSION_IDLE_S = 24 * 3600.0  # who looks at a training every few hours keeps what was selected
_LISTED_RUNS = 25
_END_S = 2.0  # that work in progress gets to end after Ctrl-C
_HINTS: dict[Effect, types.ToolAnnotations] = {
    "reads": types.ToolAnnotations(read_only_hint=True, open_world_hint=False),
    "edits": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    ),
    "starts": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=True
    ),
    "stops": types.ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
    ),
}
_INSTRUCTIONS = (
    "Train language models by reinforcement learning. rl_list_environments, rl_select_environment, rl_edit_config, "
    "rl_test_inference to see whether a model can do the task at all, rl_start_training; then rl_check_status now and "
    "then, and rl_get_results at the end. A training goes on when you disconnect."
)

Context = Any  # the SDK's ServerRequestContext, whose type parameters say nothing here


class Handlers:
    """Handlers of the MCP requests."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def _tools(self, ctx: Context) -> RlTools:
        request = ctx.request
        return self._clients.session(_ON_STDIO if request is None else request.headers.get("mcp-session-id", _ON_STDIO))

    async def list_tools(self, ctx: Context, params: Any) -> types.ListToolsResult:
        described = [
            types.Tool(name=t.name, description=t.description, input_schema=t.parameters, annotations=_HINTS[t.effect])
            for t in TOOLS.values()
        ]
        return types.ListToolsResult(tools=described)

    async def call_tool(self, ctx: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        loop = asyncio.get_running_loop()

        def progress(done: float, total: float, text: str) -> None:
            asyncio.run_coroutine_threadsafe(ctx.session.report_progress(done, total, text), loop)

        answer = await call_in_thread(self._tools(ctx), params.name, params.arguments, progress)
        text = types.TextContent(type="text", text=json.dumps(answer, ensure_ascii=False))
        return types.CallToolResult(content=[text], structured_content=answer, is_error=is_refusal(answer))

    async def list_resources(self, ctx: Context, params: Any) -> types.ListResourcesResult:
        runs, _ = await asyncio.to_thread(self._tools(ctx).manager.page, _LISTED_RUNS)
        return types.ListResourcesResult(
            resources=[
                types.Resource(
                    uri=resources.uri_of(run.run_id, kind),
                    name=f"{run.name} ({run.run_id}): {kind}",
                    mime_type=mime_type,
                    description=text,
                )
                for run in runs
                for kind, (mime_type, text) in resources.KINDS.items()
            ]
        )

    async def list_templates(self, ctx: Context, params: Any) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(
            resource_templates=[
                types.ResourceTemplate(
                    uri_template=resources.uri_of("{run_id}", kind), name=kind, mime_type=mime, description=text
                )
                for kind, (mime, text) in resources.KINDS.items()
            ]
        )

    async def read_resource(self, ctx: Context, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        uri = str(params.uri)
        try:
            mime_type, text = await asyncio.to_thread(resources.read_uri, self._tools(ctx), uri)
        except PalestraError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        content = types.TextResourceContents(uri=uri, mime_type=mime_type, text=text)
        return types.ReadResourceResult(contents=[content])


def make_server(clients: Clients) -> Server[Any]:
    """A server of the ten tools, and of the runs' resources."""
    handlers = Handlers(clients)
    return Server(
        "palestra",
        version=version("palestra"),
        instructions=_INSTRUCTIONS,
        on_list_tools=handlers.list_tools,
        on_call_tool=handlers.call_tool,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_read_resource=handlers.read_resource,
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Serve the one client that has started this process. Its stdout carries the protocol and nothing else."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (reads, writes):
        await server.run(reads, writes, server.create_initialization_options())


def run_stdio(server: Server[Any]) -> None:
    """`serve_stdio` until its client closes stdin, or Ctrl-C.

    It has a thread of its own: a read of stdin cannot be interrupted, and the interpreter cannot end around one.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve_stdio(server))

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


def http_app(server: Server[Any], token: str | None) -> ASGIApp:
    """The server for many clients over streamable HTTP, at /mcp, behind the guard."""
    unguarded = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    app = server.streamable_http_app(
        transport_security=unguarded, session_idle_timeout=_SESSION_IDLE_S, max_sessions=MAX_SESSIONS
    )
    return Guard(WholeBody(RequireSessions(app), 4 * MIB), token)


class RequireSessions:
    """Keeps clients to the protocol versions that have sessions.

    The newest has none over HTTP, and what a client has selected and edited is its own. A client that asks for
    it is told which versions there are, and goes on with one of them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS as WITH_SESSIONS

        requested = Request(scope).headers.get("mcp-protocol-version") if scope["type"] == "http" else None
        if requested is None or requested in WITH_SESSIONS:
            await self._app(scope, receive, send)
            return
        request_id = None
        with contextlib.suppress(ValueError, AttributeError):
            request_id = (await Request(scope, receive).json()).get("id")
        error = {
            "code": types.UNSUPPORTED_PROTOCOL_VERSION,
            "message": "this server keeps what each client has selected, so it needs a protocol version with sessions",
            "data": {"supported": list(WITH_SESSIONS), "requested": requested},
        }
        answer = JSONResponse({"jsonrpc": "2.0", "id": request_id, "error": error}, 400)
        await answer(scope, receive, send)
