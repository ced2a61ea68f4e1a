"""An application on a free loopback port, in a thread."""

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.servers.web import Server, open_port, url_of


@contextmanager
def served(app: Any, token: str | None = None, **options: Any) -> Iterator[str]:
    """Its URL; it has ended afterwards. `options` are the server's."""
    server, sock = Server(app, **options), open_port("127.0.0.1", 0, token)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield url_of(sock)
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def json_app(answer: Callable[[Request], Awaitable[Any]]) -> Starlette:
    """An application whose response to any request is what `answer` returns: JSON data, or a Response."""

    async def respond(request: Request) -> Response:
        made = await answer(request)
        return made if isinstance(made, Response) else JSONResponse(made)

    return Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST", "PUT"])])


def free_port() -> int:
    """A port that nothing listens on now, for a server in another process."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def wait_for_port(port: int, process: "subprocess.Popen[str]", timeout_s: float) -> None:
    """Wait until a process listens on a port; raise if it ends first."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise AssertionError(
                f"it ended with {process.returncode}: {process.stdout.read() if process.stdout else ''}"
            )
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port} after {timeout_s} s")
