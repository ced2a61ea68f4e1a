"""The tools of MCP servers for our own agent loop, by the official MCP client.

Sessions of the client belong to one event loop, and a server outlives the loops of single steps and threads; so all of
them live in one event loop, in a separate thread.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from palestra.agents.tools.tool import Tool, tools_by_name
from palestra.core.children import split_command
from palestra.core.errors import InputError, PalestraError, ServiceError, needs_extra
from palestra.core.secrets import clean_environment

T = TypeVar("T")
_CONNECTION_CLOSED = -32000  # the client's own code for a server that is gone
_LAST_WORDS = 2000  # bytes of stderr that may explain why a server did not start


class McpToolError(Exception):
    """The answer of a server to a call that failed, or the reason why there was none."""


@dataclass(frozen=True)
class McpServer:
    """An MCP server: the command that starts it, or the URL of one that runs (then it is shared by all attempts).

    Each attempt gets its own process, unless `shared` is set: for servers whose calls change no state.
    It sees no key of ours but those of `env`.
    """

    command: str | Sequence[str]
    shared: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        words = split_command(self.command)
        if not words:
            raise InputError("an MCP server has an empty command; give the command that starts it, or its URL")
        object.__setattr__(self, "command", tuple(words))
        object.__setattr__(self, "shared", self.shared or self.is_url)

    @property
    def is_url(self) -> bool:
        return len(self.command) == 1 and self.command[0].startswith(("http://", "https://"))

    def __str__(self) -> str:
        return shlex.join(self.command)


def as_mcp_server(obj: Any) -> McpServer:
    """A server, or the command or URL of one."""
    if isinstance(obj, McpServer):
        return obj
    if isinstance(obj, str) or (isinstance(obj, Sequence) and all(isinstance(word, str) for word in obj)):
        return McpServer(obj)
    raise InputError(f"{obj!r} is no MCP server; give its command as text, its URL, or McpServer(command, …)")


class McpTools:
    """The tools of some servers: `shared` ones are started once, the others by `open`, one process an attempt."""

    def __init__(self, servers: Sequence[McpServer]) -> None:
        self._servers = tuple(servers)
        self._shared: dict[int, McpConnection] = {}  # by the server's place among them
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return McpTools, (self._servers,)  # another process starts its own servers

    def open(self) -> list[McpConnection]:
        """Connections for one attempt; the caller closes those that are not shared. Blocks until they have answered."""
        opened: list[McpConnection] = []
        try:
            for at, server in enumerate(self._servers):
                if not server.shared:
                    opened.append(McpConnection(server))
                    continue
                with self._lock:
                    if at not in self._shared:
                        self._shared[at] = McpConnection(server)
                    opened.append(self._shared[at])
        except PalestraError:
            close_connections(opened)
            raise
        return opened

    def close(self) -> None:
        """End the shared servers."""
        with self._lock:
            for connection in self._shared.values():
                connection.close()
            self._shared.clear()


def close_connections(connections: Sequence[McpConnection]) -> None:
    """End the servers that belong to one attempt."""
    for connection in connections:
        if not connection.server.shared:
            connection.close()


class McpConnection:
    """A server that runs, and its tools. If it dies, the next call restarts it."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        starting = asyncio.run_coroutine_threadsafe(_start(server), _loop())
        try:
            self._live = starting.result(server.start_timeout_s + 10)
        except TimeoutError:
            starting.cancel()
            raise ServiceError(f"the MCP server {server} gave no answer within {server.start_timeout_s:g} s") from None
        self.tools: tuple[Tool, ...] = tuple(tools_by_name(map(self._tool, self._live.tools)).values())
        self._restart = asyncio.Lock()

    def close(self) -> None:
        """Close without waiting; the client gives a server two seconds to exit."""
        _loop().call_soon_threadsafe(self._live.stop.set)

    def _tool(self, served: Any) -> Tool:
        async def call(**arguments: Any) -> str:
            work = self._call(served.name, arguments)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))

        return Tool(served.name, served.description or "", dict(served.input_schema), call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError

        async with self._restart:
            if self._live.task.done() or self._live.stop.is_set():
                self._live = await _start(self.server)
            live = self._live
        try:
            result = await live.client.call_tool(name, arguments)
        except MCPError as error:
            if error.code != _CONNECTION_CLOSED:
                raise McpToolError(str(error)) from None
            live.stop.set()
            raise McpToolError(f"the MCP server {self.server} died during the call; it is restarted") from None
        # what the model reads: the texts of the answer; other blocks are named
        text = "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
        if result.is_error:
            raise McpToolError(text)
        return text


@dataclass(slots=True, eq=False)
class _Live:
    """A client that is connected until `stop` is set."""

    client: Any
    tools: Sequence[Any]
    stop: asyncio.Event
    task: asyncio.Task[None]


async def _start(server: McpServer) -> _Live:
    """Connect and list the tools; the client lives in a task, which opens and closes it."""
    with needs_extra("an MCP server", "mcp"):
        import mcp  # noqa: F401
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        task = asyncio.create_task(_live(server, ready, stop, complaints))
        try:
            async with asyncio.timeout(server.start_timeout_s):
                client, tools = await ready
        except BaseException as error:
            stop.set()
            task.cancel()
            await asyncio.wait([task], timeout=10)
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, TimeoutError):
                reason = f"it gave no answer within {server.start_timeout_s:g} s"
            else:
                complaints.seek(0)
                lines = complaints.read()[-_LAST_WORDS:].strip().splitlines()
                reason = f"{error}" + (f"; its last line was: {lines[-1]}" if lines else "")
            raise ServiceError(f"the MCP server {server} did not start: {reason}") from None
    return _Live(client, tools, stop, task)


async def _live(server: McpServer, ready: asyncio.Future[Any], stop: asyncio.Event, complaints: Any) -> None:
    from mcp import Client, StdioServerParameters, stdio_client

    command = [str(word) for word in server.command]
    environment = {**clean_environment(), **server.env}
    parameters = StdioServerParameters(command=command[0], args=command[1:], env=environment)
    try:
        transport: Any = command[0] if server.is_url else stdio_client(parameters, errlog=complaints)
        async with Client(transport) as client:
            tools, cursor = [], None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
            ready.set_result((client, tools))
            await stop.wait()
    except BaseException as error:
        if not ready.done():
            first = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            ready.set_exception(ServiceError(f"{type(first).__name__}: {first}".removesuffix(": ")))
        elif isinstance(error, asyncio.CancelledError):
            raise
        # after that a broken connection shows in the calls


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop in which all clients live."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="palestra-mcp", daemon=True).start()
    return loop
