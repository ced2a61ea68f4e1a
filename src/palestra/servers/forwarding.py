"""Requests that are passed on to another server, and its answers, piece by piece."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from starlette.responses import StreamingResponse

from palestra.core import http
from palestra.servers.http_errors import refuse

SILENCE_S = 600.0  # a model may reason for long before its first token
HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    "content-length accept-encoding".split()
)


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that are meant for the other server. Its answer is not compressed, so that it can be read here."""
    passed = {k.title(): v for k, v in headers.items() if k.lower() not in HOP_BY_HOP}
    return passed | {"Accept-Encoding": "identity"}


async def forward(
    request: http.Request, tap: Callable[[http.StreamedReply, AsyncIterator[bytes]], AsyncIterator[bytes]] | None = None
) -> StreamingResponse:
    """The other server's answer; 502 where it gives none. `tap` sees the pieces as they pass."""
    stream = request.stream()
    try:
        answer = await stream.__aenter__()
    except http.HttpError as error:
        raise refuse(502, str(error)) from None
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP - {"content-length"}}
    return StreamingResponse(_closing(answer, stream, tap), answer.status, headers)


async def _closing(
    answer: http.StreamedReply,
    stream: AbstractAsyncContextManager[http.StreamedReply],
    tap: Callable[[http.StreamedReply, AsyncIterator[bytes]], AsyncIterator[bytes]] | None,
) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.chunks if tap is None else tap(answer, answer.chunks):
            yield chunk
    finally:
        await stream.__aexit__(None, None, None)
