"""What both servers share: access, limits on bodies, errors as JSON, opening a port."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.core.errors import PalestraError, text_of
from palestra.serve.connections import CONNECTION, BoundedProtocol, Connections, limit_log_lines
from palestra.serve.tally import Counted, Tally

MIB = 1 << 20
request_log = logging.getLogger("palestra.requests")  # one line each, where somebody asks for INFO
_SILENCE_S = 30  # between two pieces of a body
_BODY_S = 600.0
_DRAIN_S = 30.0
_GRACE_S = 5
_ZSTD_WINDOW = 1 << 27  # bytes that a sender may make us hold
_MAX_MESSAGE = 2000  # characters: it may quote what was sent

T = TypeVar("T")
ErrorForm = Callable[[Request, int, str], dict[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]
Model = TypeVar("Model", bound=BaseModel)


def refuse(status: int, message: str, *, retry_after_s: int | None = None) -> HTTPException:
    """The error that becomes an OpenAI-style JSON answer."""
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return HTTPException(status, message, headers)


def make_app(
    routes: Sequence[BaseRoute],
    *,
    token: str | None = None,
    lifespan: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]] | None = None,
    error_form: ErrorForm = lambda request, status, text: error_body(status, text),
    find_post: Callable[[Scope], Endpoint | None] = lambda scope: None,
) -> Starlette:
    """An application whose every error is JSON, and which requires the token where one is set.

    Posts that `find_post` has an endpoint for are answered without looking for a route.
    """

    async def handle(request: Request, error: Exception) -> Response:
        return _error_response(request, error, error_form)

    tally = Tally()
    app = Starlette(
        routes=list(routes),
        middleware=[
            Middleware(RequestLog),
            Middleware(Counted, tally=tally),
            Middleware(Guard, token=token),
            Middleware(DirectPosts, find=find_post, error_form=error_form),
        ],
        exception_handlers={HTTPException: handle, PalestraError: handle, Exception: handle},
        lifespan=lifespan,
    )
    app.state.tally = tally
    return app


def _error_response(request: Request, error: Exception, error_form: ErrorForm) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse(error_form(request, error.status_code, error.detail), error.status_code, error.headers)
    status = 400 if isinstance(error, PalestraError) else 500
    return JSONResponse(error_form(request, status, text_of(error)), status)


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": shortened(message), "type": kind, "param": None, "code": status}}


def shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} …"


class RequestLog:
    """A line for each answered request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not request_log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            where = ascii(scope["path"][:200])[1:-1]  # no control characters in a terminal
            request_log.info("%s %s %d %.3f s", scope["method"][:16], where, status, time.perf_counter() - began)


class DirectPosts:
    """Answers the posts that `find` has an endpoint for; all else goes to the routes.

    The layers of a route and a mount take longer than reading and writing a small request.
    """

    def __init__(self, app: ASGIApp, find: Callable[[Scope], Endpoint | None], error_form: ErrorForm) -> None:
        self._app, self._find, self._error_form = app, find, error_form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._find(scope) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except (HTTPException, PalestraError) as error:
            response = _error_response(request, error, self._error_form)
        await response(scope, receive, send)


class Guard:
    """Checks the token; without one, refuses requests of web pages.

    A server on the loopback address can be reached by every page that a local browser shows. Such requests
    carry an Origin of their own, or are marked by the browser as another site's (`<img>`, links and forms have
    no Origin), or have a host name that was made to point here.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(dict(reversed(scope["headers"])))  # of several the first counts
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            status, message = refusal
            await JSONResponse(error_body(status, message), status)(scope, receive, send)

    def _refusal(self, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        if self._token:
            sent = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
            if not hmac.compare_digest(sent.removeprefix(b"Bearer "), self._token.encode()):
                return 401, "the token is missing or wrong; send it as 'Authorization: Bearer TOKEN' (or X-API-Key)"
            return None
        host = headers.get(b"host", b"localhost")
        if not (_is_loopback_host(host) and _from_no_other_site(headers)):
            return 403, "without a token, only requests to a loopback address and from no other site are answered"
        return None


def _from_no_other_site(headers: Mapping[bytes, bytes]) -> bool:
    if origin := headers.get(b"origin"):
        return is_loopback(host_of(origin.decode("latin-1")))
    return headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")


def host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@lru_cache(256)
def _is_loopback_host(header: bytes) -> bool:
    """Of the header Host, which is the same in every request of a client."""
    return is_loopback(host_of(f"//{header.decode('latin-1')}"))


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def read_body(request: Request, limit: int) -> bytes:
    """The body, unpacked where it is gzip or zstd; 413 when it holds more than `limit` bytes, packed or not."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "zstd"):
        raise refuse(415, f"content-encoding {encoding!r} is not understood; use gzip, zstd or none")
    unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    body = bytearray()
    stream = request.stream()
    try:
        async for chunk in stream if _has_arrived(request) else _in_time(stream):
            body += unpack.decompress(chunk, limit + 1 - len(body)) if unpack else chunk
            if len(body) > limit:
                await _drain(stream)
                raise _too_large(limit)
    except ClientDisconnect:
        raise refuse(499, "the client disconnected") from None
    except zlib.error as error:
        raise refuse(400, f"the body is not valid gzip: {error}") from None
    if unpack is not None and body and not unpack.eof:
        raise refuse(400, "the body is not valid gzip: it ends too early")
    return _unpack_zstd(bytes(body), limit) if encoding == "zstd" else bytes(body)


def _has_arrived(request: Request) -> bool:
    """Whether the server has all of the body already, as of most small requests: then nobody has to be timed."""
    connection = request.scope.get("state", {}).get(CONNECTION)
    cycle = None if connection is None else connection.cycle
    return cycle is not None and cycle.scope is request.scope and not cycle.more_body


def _unpack_zstd(body: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise refuse(415, "content-encoding 'zstd' needs the package zstandard on the server; use gzip") from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(body) as reader:
            found = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise refuse(400, f"the body is not valid zstd: {error}") from None
    if len(found) > limit:
        raise _too_large(limit)
    return bytes(found)


def _too_large(limit: int) -> HTTPException:
    return refuse(413, f"the body holds more than {limit // MIB} MiB; send less at once")


class WholeBody:
    """Reads a body, of limited size, before an application of others sees the request."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(Request(scope, receive), self._limit)
        except HTTPException as refusal:
            answer = JSONResponse(error_body(refusal.status_code, refusal.detail), refusal.status_code)
            await answer(scope, receive, send)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, replay, send)


async def _in_time(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces of a body; 408 for a sender that pauses or takes too long."""
    until = time.monotonic() + _BODY_S
    while time.monotonic() < until:
        with _Seconds(_SILENCE_S) as silence:
            chunk = await anext(stream, None)
        if silence.are_over:
            break
        if chunk is None:
            return
        yield chunk
    raise refuse(408, f"the body did not come within {_BODY_S:g} s, or there was none of it for {_SILENCE_S} s")


class _Seconds:
    """Ends what is awaited within it after so many seconds.

    They are counted one by one: the event loop may stand still for a training step, which is not the sender's doing.
    """

    def __init__(self, left: int) -> None:
        self._left = left
        self.are_over = False

    def __enter__(self) -> _Seconds:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._timer = self._loop.call_later(1.0, self._tick)
        return self

    def _tick(self) -> None:
        self._left -= 1
        if self._left > 0:
            self._timer = self._loop.call_later(1.0, self._tick)
        elif self._task is not None:
            self.are_over = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self._timer.cancel()
        if not self.are_over or kind is not asyncio.CancelledError or self._task is None:
            return False
        return self._task.uncancel() == 0  # else somebody else has cancelled it, too


async def _drain(stream: Any) -> None:
    """Let the sender finish, keeping nothing, so that it hears the answer instead of a broken connection."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            async for _ in stream:
                pass


async def read_model(request: Request, model: type[Model], limit: int = MIB) -> Model:
    """The body as a pydantic model; 422 with what is wrong when it is none."""
    return parse(model.model_validate_json, await read_body(request, limit))


def parse(validate: Callable[[Any], T], data: Any, status: int = 422) -> T:
    """What `validate` makes of it; `status` with what is wrong when it cannot."""
    try:
        return validate(data)
    except ValidationError as error:
        raise refuse(status, explain(error)) from None


def explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False)[:5]:
        where = ".".join(str(part)[:100] for part in item["loc"]) or "the body"
        lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    more = error.error_count() - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; a client that disconnects cancels it.

    In the request's own task: another one for the work, and one that waits for the client's end, took longer than
    all else that a server does with a small request.
    """
    connection, task, is_gone = request.scope.get("state", {}).get(CONNECTION), asyncio.current_task(), False
    if connection is None or task is None:  # no server of ours
        return await work

    def cancel() -> None:
        nonlocal is_gone
        if connection.on_lost is cancel:  # the work is not done yet
            is_gone = True
            task.cancel()

    connection.on_lost = cancel
    if connection.is_lost:
        asyncio.get_running_loop().call_soon(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if not is_gone or task.uncancel() > 0:
            raise
        raise HTTPException(499, "the client disconnected") from None
    finally:
        connection.on_lost = None


def open_port(host: str, port: int, token: str | None) -> socket.socket:
    """A bound socket (port 0: any free one). Other than loopback addresses need a token."""
    if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
        got = "an empty text" if not token else "one with outer blanks or characters beyond ASCII"
        raise PalestraError(
            f"the token is {got}, which a header cannot carry; use letters and digits, or leave --token out"
        )
    if not is_loopback(host) and not token:
        raise PalestraError(
            f"host={host!r} can be reached from other machines; set a token (--token or PALESTRA_TOKEN), "
            "or use 127.0.0.1"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PalestraError(
            f"port {port} of {host} cannot be opened ({error.strerror}); choose another one, 0 takes any free one"
        ) from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn as a task of an event loop that others use, too: signals are theirs unless `handle_signals`.

    When it ends, requests in flight have `grace_s` left; then they are answered with 503, without a traceback.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        handle_signals: bool = False,
        limits: Connections | None = None,
        grace_s: float = _GRACE_S,
    ) -> None:
        limits = limits or Connections.within_file_limit()
        limit_log_lines()
        super().__init__(
            uvicorn.Config(
                self._end_with_503(app),
                http=partial(BoundedProtocol, limits),  # type: ignore[arg-type]
                log_level="warning",
                access_log=False,
                backlog=limits.backlog,
                timeout_graceful_shutdown=_GRACE_S * 2,
                lifespan="on",
                proxy_headers=False,
                ws="none",
            )
        )
        self._handle_signals = handle_signals
        self._grace_s = grace_s

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals() if self._handle_signals else contextlib.nullcontext():
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._grace_s, self._cancel_requests)
        await super().shutdown(sockets)
        timer.cancel()

    def _cancel_requests(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()

    def _end_with_503(self, app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            is_started = False

            async def watched(message: Message) -> None:
                nonlocal is_started
                is_started = True
                await send(message)

            try:
                await app(scope, receive, watched)
            except asyncio.CancelledError:
                if scope["type"] != "http" or not self.should_exit:
                    raise
                if is_started:  # of a stream, what was sent is all there is
                    await send({"type": "http.response.body"})
                else:
                    await JSONResponse(error_body(503, "the server is shutting down"), 503)(scope, receive, send)

        return answer
