"""Shared by all servers: the application around the routes, access control, request counts, the port, and uvicorn.

And reading the body of a request: limits on its size and time, compression, and validation.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.core.errors import (
    ContextLengthError,
    NotAllowedError,
    PalestraError,
    ResourceError,
    SettingError,
    text_of,
)
from palestra.core.http import is_loopback
from palestra.core.text import read_json
from palestra.servers.connections import CONNECTION, BoundedProtocol, Connections, LimitLines

MIB = 1 << 20
_SILENCE_S = 30  # between two pieces of a body
_BODY_S = 600.0
_DRAIN_S = 30.0
_MAX_REASONS = 5  # of a body that is invalid
_ZSTD_WINDOW = 1 << 27  # bytes that a sender may make us hold

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SubjectBody(Form):
    """A training: an environment by its name, or an agent file ("demo" is the demo), with changed settings."""

    environment: str | None = None
    agent_file: str | None = None
    values: dict[str, Any] = Field(default_factory=dict)
    name: str | None = Field(None, max_length=100)


class TestBody(SubjectBody):
    """A test of that environment on some models."""

    models: list[str] | None = None
    num_steps: int = Field(2, ge=1)
    group_size: int = Field(4, ge=2)


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body, decompressed if it is gzip or zstd; 413 if it has more than `limit` bytes before or after."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "zstd"):
        raise refuse(415, f"content-encoding {encoding!r} is not understood; use gzip, zstd or none")
    too_large = refuse(413, f"the body holds more than {limit // MIB} MiB; send less in one request")
    unpack = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
    body = bytearray()
    stream = request.stream()
    cycle = getattr(request.scope.get("state", {}).get(CONNECTION), "cycle", None)
    # most small requests have arrived as a whole: then no timeout is needed
    has_arrived = cycle is not None and cycle.scope is request.scope and not cycle.more_body
    try:
        async for chunk in stream if has_arrived else _in_time(stream):
            body += unpack.decompress(chunk, limit + 1 - len(body)) if unpack else chunk
            if len(body) > limit:
                # discard the rest, so that the sender gets the answer instead of a broken connection
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DRAIN_S):
                        async for _ in stream:
                            pass
                raise too_large
    except ClientDisconnect:
        raise refuse(499, "the client disconnected") from None
    except zlib.error as error:
        raise refuse(400, f"the body is not valid gzip: {error}") from None
    if unpack is not None and body and not unpack.eof:
        raise refuse(400, "the body is not valid gzip: it ends too early")
    if encoding != "zstd":
        return bytes(body)
    try:
        import zstandard
    except ImportError:
        raise refuse(415, "content-encoding 'zstd' needs the package zstandard on the server; use gzip") from None
    try:
        with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(bytes(body)) as reader:
            unpacked = bytes(reader.read(limit + 1))
    except zstandard.ZstdError as error:
        raise refuse(400, f"the body is not valid zstd: {error}") from None
    if len(unpacked) > limit:
        raise too_large
    return unpacked


async def _in_time(stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The chunks of a body; 408 if the sender pauses or takes too long."""
    until = time.monotonic() + _BODY_S
    while time.monotonic() < until:
        piece = asyncio.ensure_future(anext(stream, None))
        try:
            # seconds are counted one by one: a training step may block the event loop, which is not the sender's fault
            for _ in range(_SILENCE_S):
                if (await asyncio.wait({piece}, timeout=1.0))[0]:
                    break
            else:
                break
        finally:
            piece.cancel()
        if (chunk := piece.result()) is None:
            return
        yield chunk
    raise refuse(408, f"the body did not come within {_BODY_S:g} s, or there was none of it for {_SILENCE_S} s")


async def read_model(request: Request, model: type[Model], limit: int = MIB) -> Model:
    """Read the body as a pydantic model; 422 with the reason if it is invalid."""
    return parse(model.model_validate_json, await read_body(request, limit))


def parse(validate: Callable[[Any], T], data: Any, status: int = 422) -> T:
    """Return `validate(data)`; raise `status` with the reason if it is invalid. Lone surrogates are replaced."""
    try:
        return validate(data)
    except ValidationError as error:
        if isinstance(data, bytes) and "hex escape" in str(error):
            with contextlib.suppress(ValueError):
                return validate(json.dumps(read_json(data.decode())))
        reasons = []
        for item in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part)[:100] for part in item["loc"]) or "the body"
            reasons.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
        if len(reasons) > _MAX_REASONS:
            reasons[_MAX_REASONS:] = [f"and {len(reasons) - _MAX_REASONS} more"]
        raise refuse(status, "; ".join(reasons)) from None


request_log = logging.getLogger("palestra.requests")  # one line per request at level INFO
_GRACE_S = 5
_WILDCARDS = ("0.0.0.0", "::", "")
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # addresses reserved for documentation

_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
_MAX_MESSAGE = 2000  # characters: it may quote what was sent

ErrorForm = Callable[[Request, int, Exception | str], dict[str, Any]]  # the status, and the error or its text


def refuse(status: int, message: str, *, retry_after_s: int | None = None) -> HTTPException:
    """The error that becomes an OpenAI-style JSON answer."""
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return HTTPException(status, message, headers)


def refusal(status: int, message: str) -> JSONResponse:
    """The answer to a request that no handler sees."""
    return JSONResponse(error_body(status, message), status)


def error_body(status: int, error: Exception | str) -> dict[str, Any]:
    """An error in OpenAI's form. Its code is a text by which clients decide what to do, as they do with OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = _CODES.get(status, "invalid_request" if status < 500 else "server_error")
    if isinstance(error, PalestraError) and status == 400:
        code = error.code
    return {"error": {"message": message_of(error), "type": kind, "param": None, "code": code}}


def message_of(error: Exception | str) -> str:
    """The text of an error. A context that is full is reported in the words that agents look for.

    They are those of Anthropic ("prompt is too long") and OpenAI ("maximum context length is"), in both dialects:
    frameworks translate between them. An agent that recognises them shortens its history or stops instead of retrying.
    """
    message = error if isinstance(error, str) else text_of(error)
    if isinstance(error, ContextLengthError):
        size = "" if error.tokens is None else f"{error.tokens} tokens > {error.limit} maximum; "
        message = f"prompt is too long: {size}{message}. This model's maximum context length is {error.limit} tokens."
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} …"


def make_app(
    routes: Sequence[BaseRoute],
    *,
    token: str | None = None,
    has_own_key: Callable[[str], bool] = lambda path: False,
    lifespan: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]] | None = None,
    error_form: ErrorForm = lambda request, status, error: error_body(status, error),
) -> Starlette:
    """An application that answers every error as JSON, and requires the token if one is set (`Guard`)."""

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return JSONResponse(error_form(request, error.status_code, error.detail), error.status_code, error.headers)
        status = 400 if isinstance(error, PalestraError) else 500
        return JSONResponse(error_form(request, status, error), status)

    tally = Tally()
    app = Starlette(
        routes=list(routes),
        middleware=[Middleware(CountRequests, tally=tally), Middleware(Guard, token=token, has_own_key=has_own_key)],
        exception_handlers={HTTPException: handle, PalestraError: handle, Exception: handle},
        lifespan=lifespan,
    )
    app.state.tally = tally
    return app


@dataclass(slots=True)
class Guard:
    """Checks the token; without one, refuses requests of web pages.

    A server on the loopback address can be reached by every page that a local browser shows. Such requests
    carry an Origin of their own, or are marked by the browser as another site's (`<img>`, links and forms have
    no Origin), or have a host name that was made to point here.

    Paths of `has_own_key` are not asked for the token: the application checks a key of its own there.
    """

    app: ASGIApp
    token: str | None
    has_own_key: Callable[[str], bool] = lambda path: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self.app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = dict(reversed(scope["headers"]))  # of several the first counts
        if self.token:
            sent = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
            is_token = hmac.compare_digest(sent.removeprefix(b"Bearer "), self.token.encode())
            if is_token or self.has_own_key(scope["path"]):
                return None
            how = "send it as 'Authorization: Bearer TOKEN' (or X-API-Key)"
            return refusal(401, f"the token is missing or wrong; {how}")
        site = headers.get(b"sec-fetch-site", b"none")
        from_no_other_site = site in (b"none", b"same-origin")
        if origin := headers.get(b"origin"):
            # accept pages of other loopback ports, unless the browser reports them as cross-site
            from_no_other_site = _is_local_url(origin) and site != b"cross-site"
        if from_no_other_site and _is_local_url(b"//" + headers.get(b"host", b"localhost")):
            return None
        return refusal(403, "without a token, only requests to a loopback address and from no other site are answered")


@lru_cache(256)
def _is_local_url(url: bytes) -> bool:
    """Whether its host is this machine; cached, since the headers are the same in every request of a client."""
    try:
        return is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False


@dataclass(slots=True)
class Tally:
    """Number of posts that an application answered, refused and is processing, and the reason of the last refusal."""

    answered: int = 0
    refused: int = 0
    running: int = 0
    reason: str = ""


@dataclass(slots=True)
class CountRequests:
    """Logs each request, and counts posts. 499 (the client disconnected) and 5xx (it will retry) are not counted."""

    app: ASGIApp
    tally: Tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post, logs = scope.get("method") == "POST", request_log.isEnabledFor(logging.INFO)
        if scope["type"] != "http" or not (is_post or logs):
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif is_post and 400 <= status < 499 and message.get("body"):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # clients often do not log the reason
                    self.tally.reason = f"{scope['path']}: {json.loads(message['body'])['error']['message']}"
            await send(message)

        self.tally.running += is_post
        try:
            await self.app(scope, receive, watched)
        finally:
            self.tally.running -= is_post
            self.tally.answered += is_post and status < 400
            self.tally.refused += is_post and 400 <= status < 499
            if logs:
                where = ascii(scope["path"][:200])[1:-1]  # no control characters in a terminal
                request_log.info("%s %s %d %.3f s", scope["method"][:16], where, status, time.perf_counter() - began)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects.

    Runs in the request's own task: separate tasks for the work and for the disconnect took longer than everything
    else of a small request.
    """
    connection, task, is_gone = request.scope.get("state", {}).get(CONNECTION), asyncio.current_task(), False
    if connection is None or task is None:  # another server, for example in tests
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
        raise refuse(499, "the client disconnected") from None
    finally:
        connection.on_lost = None


def check_token(host: str, token: str | None) -> None:
    """Refuse a token that no header can carry, and an address other than loopback without one."""
    if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
        got = "an empty text" if not token else "one with outer blanks or characters beyond ASCII"
        raise SettingError(
            f"the token is {got}, which a header cannot carry; use letters and digits, or leave --token out"
        )
    if not is_loopback(host) and not token:
        raise NotAllowedError(
            f"host={host!r} can be reached from other machines; set a token (--token or PALESTRA_TOKEN), "
            "or use 127.0.0.1"
        )


def open_port(host: str, port: int, token: str | None) -> socket.socket:
    """Bind a socket (port 0: any free one). Addresses other than loopback need a token."""
    check_token(host, token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ResourceError(
            f"port {port} of {host} cannot be opened ({error.strerror}); choose another one, 0 takes any free one"
        ) from None
    return sock


def url_of(sock: socket.socket, host: str = "") -> str:
    bound, port = sock.getsockname()[:2]
    host = host or bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable_url(host: str, sock: socket.socket) -> str:
    """A URL that works from other machines: `host`, or this machine's own address if `host` is a wildcard."""
    if host in _WILDCARDS:
        with socket.socket(sock.family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((_ELSEWHERE[sock.family], 9))  # sends nothing; it selects the address for the default route
            host = probe.getsockname()[0]
    if host in _WILDCARDS:  # no network
        host = "127.0.0.1"
    return url_of(sock, host)


class Server(uvicorn.Server):
    """uvicorn as a task of a shared event loop; it installs signal handlers only with `handle_signals`.

    At shutdown, requests in flight have `grace_s` to finish; then they are answered with 503.
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
        for logger in map(logging.getLogger, ("asyncio", "uvicorn.error")):
            if not any(isinstance(each, LimitLines) for each in logger.filters):
                logger.addFilter(LimitLines())
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
        def cancel_requests() -> None:
            for task in self.server_state.tasks:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._grace_s, cancel_requests)
        await super().shutdown(sockets)
        timer.cancel()

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
                    await refusal(503, "the server is shutting down")(scope, receive, send)

        return answer
