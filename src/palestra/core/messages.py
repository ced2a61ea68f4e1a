"""Messages <-> the dicts of chat templates and OpenAI-style servers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter
from typing import Any

from palestra.core.errors import InputError
from palestra.core.text import read_json
from palestra.core.types import Message, ToolCall, ToolResult

_ID = attrgetter("id")
_PARSER_ID = re.compile(r"call_\d+")  # of a call that has no id of its own
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")  # names of servers and datasets for it


def to_dict(message: Message, *, arguments_as_text: bool = False) -> dict[str, Any]:
    """The message as chat templates take it; OpenAI-style servers want the arguments as JSON text."""
    row: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        row["tool_calls"] = calls = []
        for call in message.tool_calls:
            calls.append(call_to_dict(call, arguments_as_text) | ({"format": call.format} if call.format else {}))
    if message.tool_call_id is not None:
        row["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        row["name"] = message.name
    return row


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text at the end of the last one, if it is a user's; else in a message of its own."""
    if not messages or messages[-1].role != "user":
        return [*messages, Message("user", text)]
    return [*messages[:-1], replace(messages[-1], text=f"{messages[-1].text}\n\n{text}".strip())]


def from_dict(row: Mapping[str, Any]) -> Message:
    """A message out of a dict: content as text, None or text parts; arguments as object or JSON text."""
    role = _ROLES.get(row.get("role", ""))
    if role is None:
        raise InputError(f"a message has the role {row.get('role')!r}; expected one of {', '.join(_ROLES)}")
    return Message(
        role=role,  # type: ignore[arg-type]
        text=_text(row.get("content")),
        tool_calls=tuple(_call_from_dict(call, i) for i, call in enumerate(row.get("tool_calls") or ())),
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
        reasoning=next((text for key in _REASONING if (text := row.get(key)) and isinstance(text, str)), ""),
    )


def prompt_length(messages: Sequence[Message]) -> int:
    """How many messages come before the first one of the assistant."""
    return next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))


def as_messages(value: str | Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """A text is one user message; a sequence holds messages or dicts."""
    if isinstance(value, str):
        return (Message("user", value),)
    items = tuple(value) if isinstance(value, Iterable) else (value,)
    for item in items:
        if not isinstance(item, (Message, Mapping)):
            raise InputError(f"{item!r:.100} is no message; expected a text, or dicts with `role` and `content`")
    return tuple(item if isinstance(item, Message) else from_dict(item) for item in items)


def call_to_dict(call: ToolCall, arguments_as_text: bool = True) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if arguments_as_text else call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_from_dict(row: Mapping[str, Any], index: int) -> ToolCall:
    function = row.get("function", row)
    call_id = row.get("id") or f"call_{index}"
    name = function.get("name") or ""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return ToolCall(call_id, name, error=f"the arguments of the call to {name!r} are not valid JSON")
    if not isinstance(arguments, dict):
        return ToolCall(call_id, name, error=f"the arguments of the call to {name!r} are not a JSON object")
    return ToolCall(call_id, name, arguments, format=str(row.get("format") or ""))


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            shown = repr(part) if len(repr(part)) < 200 else f"{repr(part)[:100]} …"  # an image is long
            raise InputError(f"a message has a content part that is not text: {shown}; only text is supported")
        parts.append(text)
    return "".join(parts)


def with_unique_ids(messages: Sequence[Message], first: int = 0) -> list[Message]:
    """Number the calls of a conversation through: parsers number those of each message from 0.

    Ids that a model or a server made are kept, and so are all ids before the message `first`.
    """
    numbered = list(messages[:first])
    taken: set[str] = set()
    for message in numbered:
        taken.update(map(_ID, message.tool_calls))
    number = 0
    new_ids: dict[str | None, str] = {}  # of the last assistant message's calls, by their old ids
    for message in messages[first:]:
        calls, result_of = message.tool_calls, message.tool_call_id
        if calls:
            new_ids = {}
            for call in calls:
                if _PARSER_ID.fullmatch(call.id):
                    while (name := f"call_{number}") in taken:
                        number += 1
                    new_ids[call.id] = name
                    number += 1
            calls = tuple(map(_with_id, calls, repeat(new_ids)))
        else:
            result_of = new_ids.get(result_of, result_of)
        if calls != message.tool_calls or result_of != message.tool_call_id:
            message = Message(message.role, message.text, calls, result_of, message.name, message.reasoning)
        numbered.append(message)
    return numbered


def _with_id(call: ToolCall, new_ids: Mapping[str | None, str]) -> ToolCall:
    """The call under its new id. `dataclasses.replace` takes three times as long, and every call is numbered."""
    call_id = new_ids.get(call.id, call.id)
    return call if call.id == call_id else ToolCall(call_id, call.name, call.arguments, call.error, call.format)


def number_calls(
    messages: Sequence[Message], results: Sequence[ToolResult], first: int = 0
) -> tuple[list[Message], list[ToolResult]]:
    """`with_unique_ids`, and the results with the new ids; not each tool message of an environment has a result."""
    numbered = with_unique_ids(messages, first)
    both = zip(messages[first:], numbered[first:], strict=True)
    renamed = []
    for r in results:
        call = r.call
        for old, new in both:
            if new.role == "tool" and old.tool_call_id == call.id:
                call = _with_id(call, {call.id: new.tool_call_id or call.id})
                break
        renamed.append(r if call is r.call else ToolResult(call, r.content, r.ok, r.seconds, r.raised))
    return numbered, renamed


def show_call(call: ToolCall) -> str:
    """
    >>> show_call(ToolCall("1", "add", {"a": 1, "b": 2}))
    'add(a=1, b=2)'
    """
    if call.error:
        return f"{call.name or 'a tool'}, in a form that cannot be parsed"
    arguments = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"
