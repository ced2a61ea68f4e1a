"""A recorder in front of any OpenAI- or Anthropic-style API: it forwards everything unchanged and stores traces.

The caller's key goes to the API only: no header is stored, and a key in a text is redacted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core import http
from palestra.core.files import append_jsonl
from palestra.extras.record.trace_formats import Dialect, Traces, dialect_of, read_answer
from palestra.servers.forwarding import SILENCE_S, forward, passed_headers
from palestra.servers.web import MIB, make_app, read_body

log = logging.getLogger("palestra")
OPENAI, ANTHROPIC = "https://api.openai.com", "https://api.anthropic.com"
_MAX_BODY = 64 * MIB
_KEY_HEADERS = ("authorization", "x-api-key", "api-key")
_MIN_KEY = 8


class Recorder:
    """The application, and the file that traces are added to. `upstream` is a base URL without /v1."""

    def __init__(self, file: Path, upstream: str | None = None) -> None:
        self.file = file
        self._upstream = upstream.rstrip("/").removesuffix("/v1") if upstream else None
        self._traces = Traces()
        self._lock = asyncio.Lock()

    def app(self) -> Starlette:
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        return make_app([Route("/{path:path}", self._pass_on, methods=methods)])

    async def _pass_on(self, request: Request) -> Response:
        body = await read_body(request, _MAX_BODY)
        path = request.url.path
        is_anthropic = "anthropic-version" in request.headers or "x-api-key" in request.headers
        base = self._upstream or (ANTHROPIC if is_anthropic else OPENAI)
        url = f"{base}{path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = passed_headers(request.headers)
        asked = http.Request(url, body or None, request.method, headers=headers, timeout_s=SILENCE_S)
        began = time.time()
        keys = [request.headers[k].removeprefix("Bearer ") for k in _KEY_HEADERS if k in request.headers]

        async def recorded(answer: http.StreamedReply, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            dialect = dialect_of(path) if request.method == "POST" and answer.status == 200 else None
            whole = bytearray()
            async for chunk in chunks:
                if dialect is not None and len(whole) <= _MAX_BODY:
                    whole += chunk
                yield chunk
            if dialect is not None:
                await self._keep(dialect, body, answer.headers, bytes(whole), began, keys)

        return await forward(asked, recorded)

    async def _keep(
        self, dialect: Dialect, body: bytes, headers: Mapping[str, str], whole: bytes, began: float, keys: list[str]
    ) -> None:
        """Store the exchange. One that cannot be parsed is logged and never disturbs the caller."""
        try:
            answer = read_answer(dialect, headers.get("content-type", ""), whole)
            lines = self._traces.lines(dialect, json.loads(body), answer)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration, RecursionError) as error:
            log.warning("an exchange could not be recorded: %s: %s", type(error).__name__, error)
            return
        when: dict[str, Any] = {
            "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.time() - began, 3),
        }
        text = json.dumps([line | when for line in lines], ensure_ascii=False)
        for key in keys:  # the caller's, in case a message contains one
            text = text.replace(key, "[API key]") if len(key) >= _MIN_KEY else text
        async with self._lock:
            append_jsonl(self.file, json.loads(text))
