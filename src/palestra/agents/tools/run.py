"""Running the tool calls of one turn: all at once, each with a time limit; every failure is an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from palestra.agents.tools.arguments import ArgumentError, read_arguments
from palestra.agents.tools.tool import Tool
from palestra.core.calls import CallTimeout, call_with_limit
from palestra.core.errors import did_you_mean
from palestra.core.messages import encodable
from palestra.core.types import ToolCall, ToolResult

MAX_ERROR_CHARS = 300


async def run_calls(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall], timeout_s: float, max_result_chars: int = 20_000
) -> list[ToolResult]:
    """The results of all calls, in their order. Errors are results that the model reads, never raised."""
    if len(calls) == 1:
        return [await _run_call(tools, calls[0], timeout_s, max_result_chars)]
    return list(await asyncio.gather(*(_run_call(tools, call, timeout_s, max_result_chars) for call in calls)))


async def _run_call(tools: Mapping[str, Tool], call: ToolCall, timeout_s: float, max_chars: int) -> ToolResult:
    started = time.perf_counter()

    def failed(text: str, *, raised: bool = False) -> ToolResult:
        short = text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"
        seconds = time.perf_counter() - started
        return ToolResult(call, encodable(f"Error: {short}"), ok=False, seconds=seconds, raised=raised)

    if call.error is not None:
        return ToolResult(call, shorten(encodable(f"Error: {call.error}"), max_chars), ok=False)
    tool = tools.get(call.name)
    if tool is None:
        known = f"The tools are: {', '.join(tools)}." if tools else "There are no tools."
        return failed(f"there is no tool {call.name!r}.{did_you_mean(call.name, tools)} {known}")
    try:
        arguments = read_arguments(tool, call.arguments)
        value = await call_with_limit(tool.fn, timeout_s=timeout_s, **arguments)
    except ArgumentError as problem:
        return failed(str(problem))
    except CallTimeout as problem:
        return failed(f"{call.name} {problem}", raised=True)
    except (Exception, SystemExit) as error:  # a tool must not end the run; Ctrl-C and cancellation still do
        return failed(f"{call.name} raised {type(error).__name__}: {error}".removesuffix(": "), raised=True)
    try:
        content = _as_text(value)
    except Exception as error:
        kind = f"{type(value).__name__}, which has no text form"
        return failed(f"{call.name} returned {kind} ({type(error).__name__}: {error})", raised=True)
    return ToolResult(call, shorten(content, max_chars), seconds=time.perf_counter() - started)


def shorten(text: str, max_chars: int) -> str:
    """The text, or its beginning with a line that says how much of it there was.

    >>> shorten("aaaabbbb", 4)
    'aaaa\\n[cut off: these are the first 4 of 8 characters]'
    """
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut off: these are the first {max_chars} of {len(text)} characters]"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return encodable(value)
    return encodable(json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False))
