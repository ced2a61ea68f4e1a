"""Answers: JSON that no content can break, and server-sent events."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from palestra.core.errors import PalestraError
from palestra.core.text import encodable
from palestra.servers.web import error_body, refuse

Event = tuple[str, Any]  # its name and its data
_PING_S = 15.0


def to_json(data: Any) -> str:
    """JSON with null for NaN and infinity; lone surrogates are replaced."""
    try:
        text = json.dumps(data, ensure_ascii=False, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:
        finite = json.loads(json.dumps(data, default=str), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False, separators=(",", ":"))
    return str(encodable(text))


def answer(data: Any, status: int = 200) -> Response:
    return Response(to_json(data), status, media_type="application/json")


def events(source: AsyncIterator[Event]) -> Response:
    """A stream of events, with a comment now and then so that no proxy closes it."""
    return StreamingResponse(_lines(source), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _lines(source: AsyncIterator[Event]) -> AsyncIterator[str]:
    upcoming = asyncio.ensure_future(anext(source, None))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=_PING_S)
            if not done:
                yield ": ping\n\n"
                continue
            try:
                event = upcoming.result()
            except PalestraError as error:
                yield f"event: error\ndata: {to_json(error_body(400, str(error))['error'])}\n\n"
                return
            if event is None:
                return
            yield f"event: {event[0]}\ndata: {to_json(event[1])}\n\n"
            upcoming = asyncio.ensure_future(anext(source, None))
    finally:
        upcoming.cancel()


def number(request: Request, name: str, default: float | None = None) -> float | None:
    """A number of the query; 400 if it is not a number."""
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise refuse(400, f"{name}={text[:80]!r} is not a number")
    return value


def paged(total: int, start: int, limit: int) -> dict[str, Any]:
    """The cursor of the next page, None at the end, and how many rows there are in all."""
    return {"next": str(start + limit) if start + limit < total else None, "total": total}


def whole(request: Request, name: str, default: int, most: int) -> int:
    """A whole number of the query, from 0 to `most`."""
    return int(max(0, min(most, number(request, name, default) or 0)))
