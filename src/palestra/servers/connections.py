"""Connection limits of a server: number, idle time, header size, and log lines per minute.

uvicorn's own limits do not cover this: `limit_concurrency` lets idle connections lock out active clients, its
keep-alive timeout starts after the first response, and its header limit holds for h11 only."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    HttpProtocol = H11Protocol
else:
    try:  # in C, which takes a quarter of the time; its class has the methods and fields that are used here
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
    except ImportError:
        HttpProtocol = H11Protocol

_MAX_CONNECTIONS = 4096
_BACKLOG = 512  # asyncio accepts as many at once before it looks at any of them
_OTHER_FILES = 128  # that the process needs beside its connections
_HEADERS_S = 30.0
_MAX_HEADERS = 1 << 16  # bytes
CONNECTION = "connection"  # the name of the protocol in a request's state
_GRACE_S = 1.0
_LINES_A_MINUTE = 20
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Connections:
    """The limits of one server, and its idle connections (no complete request in flight), oldest first."""

    limit: int
    backlog: int
    headers_s: float = _HEADERS_S
    idle: dict[BoundedProtocol, asyncio.TimerHandle] = field(default_factory=dict)

    @classmethod
    def within_file_limit(cls) -> Connections:
        """The most connections that the limit on open files allows; raise a low soft limit if possible."""
        needed = _MAX_CONNECTIONS + _BACKLOG + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        files = needed if soft == resource.RLIM_INFINITY else min(soft, needed)
        backlog = min(_BACKLOG, files // 4)
        return cls(max(16, files - backlog - _OTHER_FILES), backlog)


class BoundedProtocol(HttpProtocol):
    """HTTP/1.1 over one connection. When the server is full, the connection that was idle longest is closed.

    Handlers find it in the request's state; `on_lost` is called when the client disconnects.
    """

    def __init__(self, limits: Connections, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.app_state = {**self.app_state, CONNECTION: self}
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        self._limits = limits
        self._header_bytes = 0  # of a request that has only begun

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.limit:
            oldest = next(iter(self._limits.idle), self)
            oldest.transport.write(_FULL)
            oldest.transport.close()
            oldest._cancel_idle_timer()
            if oldest is self:
                return
        self._update_idle_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_idle_timer()
        self._header_bytes = self._header_bytes + len(data) if self in self._limits.idle else 0
        if self._header_bytes > _MAX_HEADERS:
            self.transport.write(_LONG)
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_idle_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_idle_timer()
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def _update_idle_timer(self) -> None:
        """Run the idle timer while no request is in flight, even if parts of one arrive."""

        def close_later() -> None:
            # one more second: a training step may have blocked the event loop while the request was waiting
            self._limits.idle[self] = self.loop.call_later(_GRACE_S, self.transport.close)

        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._cancel_idle_timer()
        elif self not in self._limits.idle:
            self._limits.idle[self] = self.loop.call_later(self._limits.headers_s, close_later)

    def _cancel_idle_timer(self) -> None:
        if timer := self._limits.idle.pop(self, None):
            timer.cancel()


class LimitLines(logging.Filter):
    """Limits log lines that clients can cause to `lines` per minute; the rest is counted."""

    def __init__(self, lines: int = _LINES_A_MINUTE) -> None:
        super().__init__()
        self._lines = lines
        self._began, self._seen = -60.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        if monotonic() - self._began >= 60.0:
            left_out = self._seen - self._lines
            self._began, self._seen = monotonic(), 0
            if left_out > 0:
                record.msg, record.args = f"{record.getMessage()} ({left_out} lines were left out before)", ()
        self._seen += 1
        return self._seen <= self._lines
