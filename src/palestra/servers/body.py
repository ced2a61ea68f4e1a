"""Reading the body of a request: limits on its size and time, compression, and validation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect, Request

from palestra.core.text import read_json
from palestra.servers.connections import CONNECTION
from palestra.servers.web import refuse

MIB = 1 << 20
_SILENCE_S = 30  # between two pieces of a body
_BODY_S = 600.0
_DRAIN_S = 30.0
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
        raise refuse(status, _explain(error)) from None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False, include_input=False)[:5]:
        where = ".".join(str(part)[:100] for part in item["loc"]) or "the body"
        lines.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    more = error.error_count() - len(lines)
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")
