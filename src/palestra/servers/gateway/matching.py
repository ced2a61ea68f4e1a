"""When two messages are the same: the rule by which a request finds its conversation (docs/gateway.md).

A client sends the whole history with every request, often not letter by letter as it got it. Here messages become
keys that are equal where the difference does not count: order, spacing and number format of JSON, ids of tool calls,
thinking, and whitespace at the end.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from palestra.core.types import Message
from palestra.models.chat.toolcalls import strip_reasoning

Key = tuple[Any, ...]
_MAX_CACHED = 2048  # characters of a value whose key is kept
_to_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def request_keys(messages: Sequence[Message]) -> list[Key]:
    """The key of each message. A tool result counts by which of the last calls it answers, whatever their ids."""
    keys: list[Key] = []
    positions: dict[str | None, int] = {}
    for message in messages:
        if message.role == "assistant":
            positions = {call.id: i for i, call in enumerate(message.tool_calls)}
            keys.append(reply_keys(message)[0])
        elif message.role == "tool":
            place = positions.get(message.tool_call_id, message.tool_call_id)
            result_key = _cached_result_key if len(message.text) <= _MAX_CACHED else _result_key
            keys.append(("tool", place, result_key(message.text)))
        else:
            keys.append((message.role, message.name, message.text.rstrip()))
    return keys


def reply_keys(message: Message) -> tuple[Key, ...]:
    """All keys that match a reply: its text without thinking and outer whitespace, and the values of its calls.

    The second one is without text: some clients drop that of a message with tool calls.
    """
    calls: list[Key] = []
    for call in message.tool_calls:  # every request of a conversation brings those of all its calls again
        marshalled = marshal.dumps(call.arguments, 2)
        is_short = len(marshalled) <= _MAX_CACHED
        arguments = _marshalled_key(marshalled) if is_short else value_key(call.arguments)
        calls.append((call.name, arguments, call.error))
    text = strip_reasoning(message.text)
    full = ("assistant", text, tuple(calls))
    return (full, ("assistant", "", full[2])) if text and calls else (full,)


def opening_key(tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The tools and the template's variables, which are the same in most requests."""
    return _marshalled_key(marshal.dumps([tools, variables], 2))  # ten times as quick as JSON


@lru_cache(8192)
def _marshalled_key(marshalled: bytes) -> str:
    return value_key(marshal.loads(marshalled))


def value_key(value: Any) -> str:
    """A JSON value without the order of its keys; numbers as doubles, which is all that JavaScript keeps of them."""
    return _to_json(_as_doubles(value))


def _as_doubles(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _as_doubles(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_doubles(each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0  # -0.0 is 0.0
        except OverflowError:
            return str(value)
    return value


def _result_key(text: str) -> str:
    """The key of a tool result: JSON objects and lists by value, otherwise the text."""
    body = text.strip()
    if body[:1] in ("{", "["):
        try:
            return "json " + value_key(json.loads(body))
        except (ValueError, RecursionError):
            pass
    return "text " + text.rstrip()


_cached_result_key = lru_cache(8192)(_result_key)
