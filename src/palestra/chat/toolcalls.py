"""Tool calls out of an assistant's text, in the form `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import json
import re
from typing import Any

from palestra.core.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FORM = 'Write <tool_call>{"name": "tool_name", "arguments": {…}}</tool_call>.'
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_LEFT_OPEN_BY_PROMPT = re.compile(r"\A(?:(?!<think>).)*?</think>", re.DOTALL)


def parse_assistant(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text outside of the call blocks, and the calls. What cannot be read is a ToolCall with `.error`.

    >>> parse_assistant('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', (ToolCall(id='call_0', name='add', arguments={'a': 1}, error=None),))
    """
    thinking, rest = _split_thinking(text)
    parts = [thinking]
    calls: list[ToolCall] = []
    position = 0
    while (start := rest.find(OPEN, position)) >= 0:
        parts.append(rest[position:start])
        body, position = _next_block(rest, start + len(OPEN))
        if body is None:
            calls.append(_broken(len(calls), f"a tool call was opened with {OPEN} but not closed with {CLOSE}"))
        else:
            calls.append(_read_call(body, len(calls)))
    parts.append(rest[position:])
    return "".join(parts).strip(), tuple(calls)


def strip_thinking(text: str) -> str:
    """The text without `<think>…</think>`, also where the prompt had opened it or nothing closed it."""
    return _THINKING.sub("", _LEFT_OPEN_BY_PROMPT.sub("", text, count=1)).strip()


def _split_thinking(text: str) -> tuple[str, str]:
    """The thinking at the start, in which a call is only talk, and what follows."""
    end = text.find("</think>")
    opening = text.find(OPEN)
    if end >= 0 and (text.lstrip().startswith("<think>") or opening < 0 or end < opening):
        end += len("</think>")
        return text[:end], text[end:]
    return "", text


def _next_block(text: str, start: int) -> tuple[str | None, int]:
    """The body of the block that begins at `start` (None when nothing closes it), and where the text goes on."""
    try:  # tags inside of a JSON string are part of the argument
        _, end = json.JSONDecoder().raw_decode(text, start + len(text[start:]) - len(text[start:].lstrip()))
    except (ValueError, RecursionError):
        end = start
    close, reopened = text.find(CLOSE, end), text.find(OPEN, end)
    if close >= 0 and (reopened < 0 or close < reopened):
        return text[start:close], close + len(CLOSE)
    return None, reopened if reopened >= 0 else len(text)


def _read_call(body: str, index: int) -> ToolCall:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return _broken(index, f"the tool call is not valid JSON ({_reason(error)})")
    if not isinstance(value, dict):
        return _broken(index, "the tool call is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _broken(index, 'the tool call has no "name"')
    arguments: Any = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _broken(index, f'"arguments" is text that is not valid JSON ({_reason(error)})', name)
    if not isinstance(arguments, dict):
        return _broken(index, '"arguments" is not a JSON object', name)
    return ToolCall(f"call_{index}", name, arguments)


def _broken(index: int, reason: str, name: str = "") -> ToolCall:
    return ToolCall(f"call_{index}", name, error=f"{reason}. {_FORM}")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
