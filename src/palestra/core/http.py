"""The HTTP client: JSON both ways, bounded answers, retries, and errors that name the URL and the reason."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from palestra.core.errors import ServiceError

_CONNECT_S = 30.0
_MAX_RETRY_AFTER_S = 60.0
_QUOTED = 300  # characters of an error's body that its message repeats
_MARKUP = re.compile(r"<(head|style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("example.com")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpError(ServiceError):
    """A request without a usable answer; `status` is None when there was no answer at all.

    >>> print(HttpError("http://host/x", "no room", 503))
    http://host/x answered 503: no room
    """

    def __init__(self, url: str, reason: str, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(f"{url} {'could not be asked' if status is None else f'answered {status}'}: {reason}")
        self.reason = reason
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may be answered later."""
        return self.status is None or self.status == 429 or (self.status >= 500 and self.status != 501)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """An answer whose body comes in pieces, as the server sends them."""

    status: int
    headers: Mapping[str, str]
    chunks: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Request:
    """One request. A `token` goes to this URL only: redirects are followed for GET and HEAD without one."""

    url: str
    body: Mapping[str, Any] | bytes | None = None  # a mapping is sent as JSON
    method: str = ""  # POST with a body, else GET
    token: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0  # without a byte from the server
    max_bytes: int = 64 * 2**20  # of the answer

    def send(self) -> Reply:
        """Whatever the server answers, an error status too; HttpError when it gives no answer."""
        import httpx  # here: `import palestra` and `palestra --help` do without it

        with (
            self._explained(),
            httpx.Client(**self._client()) as client,
            client.stream(**self._arguments()) as response,
        ):
            body = bytearray()
            for chunk in response.iter_bytes():
                self._add(body, chunk, response.status_code)
            return Reply(response.status_code, bytes(body), response.headers)

    async def send_async(self) -> Reply:
        """As `send`; cancelling it closes the connection."""
        async with self._open() as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                self._add(body, chunk, response.status_code)
            return Reply(response.status_code, bytes(body), response.headers)

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[StreamedReply]:
        """As `send_async`, without waiting for the end of the answer; its bytes are not decoded, and have no limit."""
        async with self._open() as response:
            yield StreamedReply(response.status_code, response.headers, response.aiter_raw())

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        import httpx

        with self._explained():
            async with httpx.AsyncClient(**self._client()) as client, client.stream(**self._arguments()) as response:
                yield response

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """HttpError for whatever keeps the server's answer from us."""
        import httpx

        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            timed_out = isinstance(error, httpx.TimeoutException)
            reason = f"no answer within {self.timeout_s:g} s" if timed_out else str(error)
            cause: BaseException | None = error
            while cause is not None:  # httpx says "All connection attempts failed"; the operating system says why
                if isinstance(cause, OSError) and cause.strerror:
                    reason = str(cause)
                    break
                cause = cause.__cause__ or cause.__context__
            raise HttpError(self.url, reason or type(error).__name__) from error

    def check(self, reply: Reply) -> None:
        """HttpError for an error status."""
        if not 200 <= reply.status < 300:
            reason = _said(reply.body)
            if target := reply.headers.get("Location"):
                reason = f"it redirects to {target}, which is not followed with a key or a body; give that URL itself"
            seconds = reply.headers.get("Retry-After", "")
            retry_after_s = min(float(seconds), _MAX_RETRY_AFTER_S) if seconds.isdecimal() else None
            raise HttpError(self.url, reason, reply.status, retry_after_s)

    def parse(self, reply: Reply) -> Any:
        """What `reply` holds; HttpError for an error status."""
        self.check(reply)
        try:
            return json.loads(reply.body)
        except ValueError as error:
            raise HttpError(self.url, f"its answer is not JSON: {error}", reply.status) from None

    def _client(self) -> dict[str, Any]:
        import httpx

        timeout = httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, _CONNECT_S))
        is_local = is_loopback(urlsplit(self.url).hostname or "")
        return {"verify": _ssl(), "timeout": timeout, "trust_env": not is_local}  # trust_env: proxies

    def _arguments(self) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", **self.headers}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        content = json.dumps(self.body).encode() if isinstance(self.body, Mapping) else self.body
        method = self.method or ("GET" if content is None else "POST")
        follow = not self.token and method in ("GET", "HEAD")
        return {"method": method, "url": self.url, "content": content, "headers": headers, "follow_redirects": follow}

    def _add(self, body: bytearray, chunk: bytes, status: int) -> None:
        body += chunk
        if len(body) > self.max_bytes:
            raise HttpError(self.url, f"it answers with more than {self.max_bytes:,} bytes", status)


@dataclass(frozen=True, slots=True)
class Retries:
    """How long the same request is repeated; a server's Retry-After goes before `pause_s`."""

    attempts: int | None = None
    busy_s: float = float("inf")  # while it answers 429 or 5xx
    unreachable_s: float = float("inf")  # while it does not answer at all
    pause_s: float = 1.0
    backoff: float = 1.0  # factor by which each pause is longer than the previous one

    def begin(self) -> Callable[[HttpError], float]:
        """A function that says how long to wait before the next attempt; it raises the error when there is none."""
        attempts, began = 0, time.monotonic()
        answered = began  # when it was last answered, with any status

        def pause_s(error: HttpError) -> float:
            nonlocal attempts, answered
            attempts, now = attempts + 1, time.monotonic()
            if error.status is None:
                is_over = now - answered >= self.unreachable_s
            else:
                answered, is_over = now, now - began >= self.busy_s or not error.is_retryable
            if is_over or attempts == self.attempts:
                raise error
            return error.retry_after_s or self.pause_s * self.backoff ** (attempts - 1)

        return pause_s


def ask(request: Request, retries: Retries) -> Any:
    """The JSON of the answer; HttpError when there is none in time, or when the server refuses."""
    pause_s = retries.begin()
    while True:
        try:
            return request.parse(request.send())
        except HttpError as error:
            time.sleep(pause_s(error))


async def ask_async(request: Request, retries: Retries) -> Any:
    pause_s = retries.begin()
    while True:
        try:
            return request.parse(await request.send_async())
        except HttpError as error:
            await asyncio.sleep(pause_s(error))


class ConcurrencyLimit:
    """A limit on the requests in flight in one event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def slot(self) -> asyncio.Semaphore:
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._limit))


@lru_cache(1)
def _ssl() -> ssl.SSLContext:
    """The system's certificates, read once: reading them takes longer than a request."""
    return ssl.create_default_context()


def _said(body: bytes) -> str:
    """The beginning of an error's body; of a page its text.

    >>> _said(b"<html><head><title>Error</title></head>\\n<body><h1>No</h1> such <b>path</b></body></html>")
    'No such path'
    """
    text = body[: 8 * _QUOTED].decode(errors="replace")
    if "<html" in text.lower():
        text = " ".join(_MARKUP.sub(" ", text).split())
    return text[:_QUOTED]
