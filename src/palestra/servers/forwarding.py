"""Requests that are passed on to another server, and its answers, piece by piece."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from palestra.core import http
from palestra.servers.web import MIB, read_body, refuse

KEY_PREFIX = "sk-palestra-"  # of the keys of all attempts
SILENCE_S = 600.0  # a model may reason for long before its first token
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    "content-length accept-encoding".split()
)
_MAX_BODY = 64 * MIB
_KEYS = ("Authorization", "X-Api-Key", "Api-Key")
Tap = Callable[[http.StreamedReply, AsyncIterator[bytes]], AsyncIterator[bytes]]


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers for the other server. It is asked for no compression, so that its answer can be read here."""
    passed = {k.title(): v for k, v in headers.items() if k.lower() not in HOP_BY_HOP}
    return passed | {"Accept-Encoding": "identity"}


async def forward(request: http.Request, tap: Tap | None = None) -> StreamingResponse:
    """The other server's answer; 502 where it gives none. `tap` sees the pieces as they pass."""
    stream = request.stream()
    try:
        answer = await stream.__aenter__()
    except http.HttpError as error:
        raise refuse(502, str(error)) from None
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP - {"content-length"}}

    async def chunks() -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.chunks if tap is None else tap(answer, answer.chunks):
                yield chunk
        finally:
            await stream.__aexit__(None, None, None)

    return StreamingResponse(chunks(), answer.status, headers)


def new_key() -> str:
    return f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"


@dataclass(eq=False)
class ForwardedAgent:
    """An agent of an attempt whose model is elsewhere, with a key that it never sees. Nothing of it is recorded."""

    gateway_url: str
    upstream: str  # up to /v1
    model: str | None = None  # replaces the name in the requests
    key: str | None = field(default=None, repr=False)
    on_end: Callable[[ForwardedAgent], None] = lambda agent: None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16), init=False)
    api_key: str = field(default_factory=new_key, init=False, repr=False)

    @property
    def base_url(self) -> str:
        return f"{self.gateway_url}/attempt/{self.id}/v1"

    async def forward(self, request: Request) -> Response:
        """The upstream's answer to this request."""
        _, prefix, path = request.url.path.partition("/v1/")
        if not prefix:
            raise refuse(404, "this agent's model is elsewhere; only requests below /v1 are passed on")
        body = await read_body(request, _MAX_BODY)
        if self.model is not None and body:
            try:
                body = json.dumps({**json.loads(body), "model": self.model}).encode()
            except (ValueError, TypeError):
                raise refuse(400, "the body is not a JSON object") from None
        headers = {name: value for name, value in passed_headers(request.headers).items() if name not in _KEYS}
        if self.key is not None:
            headers |= {"Authorization": f"Bearer {self.key}", "X-Api-Key": self.key}
        url = f"{self.upstream.rstrip('/').removesuffix('/v1')}/v1/{path}"
        return await forward(http.Request(url, body or None, request.method, headers=headers, timeout_s=SILENCE_S))

    async def finish(self) -> None:
        """Refuse its key from now on."""
        self.on_end(self)
