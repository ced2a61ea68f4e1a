"""Conversations that show how a model should act, read from files.

The format is recognised line by line: OpenAI chat (also what `palestra record` writes), TRL and Anthropic.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from palestra.core.errors import InputError, PalestraError, UnreadableFileError
from palestra.core.extras import provided
from palestra.core.messages import from_dict, to_dict
from palestra.core.text import read_json
from palestra.core.types import Message, ToolCall

Json = dict[str, Any]
FORMATS = (
    'OpenAI chat {"messages": […], "tools": […]}, TRL {"prompt": …, "completion": …} and '
    'Anthropic {"system": …, "messages": […]}'
)
_REMOVED = {"conversations": "ShareGPT", "steps": "ATIF"}  # key -> the format that has it
ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
log = logging.getLogger("palestra")
_CONVERSION_ERRORS = (PalestraError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, the schemas of the tools that the assistant had, and where they come from ("traces.jsonl, line 3").

    >>> hello = Conversation((Message("user", "Hello"), Message("assistant", "Hi.")))
    >>> hello.with_system("Be brief.").messages[0].text
    'Be brief.'
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    origin: str = "a conversation"
    untrained: frozenset[int] = frozenset()  # places of assistant messages with weight 0

    @property
    def tool_names(self) -> tuple[str, ...]:
        return tuple(str(tool.get("function", tool).get("name", "")) for tool in self.tools)

    def with_system(self, instructions: str) -> Conversation:
        """With these instructions in front, unless it has a system message."""
        if not instructions or any(message.role == "system" for message in self.messages):
            return self
        messages = (Message("system", instructions), *self.messages)
        return replace(self, messages=messages, untrained=frozenset(i + 1 for i in self.untrained))

    def to_dict(self) -> dict[str, Any]:
        """A line of OpenAI chat JSONL, which `read_conversations` reads back."""
        rows = [to_dict(message, arguments_as_text=True) for message in self.messages]
        for i, (row, message) in enumerate(zip(rows, self.messages, strict=True)):
            row |= {"weight": 0} if i in self.untrained else {}
            row |= {"reasoning_content": message.reasoning} if message.role == "assistant" and message.reasoning else {}
        return {"messages": rows, "tools": list(self.tools)}


def read_conversations(path: Path) -> list[Conversation]:
    """All conversations of a file: JSON lines, or one JSON document (an object, or a list of them).

    A line that is wrong raises PalestraError with its number. A conversation that is the beginning of another one in
    the file is part of that one: `palestra record` writes a line for each request of an agent.
    """
    conversations = []
    for origin, record in _records(path):
        try:
            conversations.append(conversation_from(record, origin))
        except _CONVERSION_ERRORS as error:
            raise InputError(f"{origin}: {_reason(error)}. Correct it, or take it out") from None
    if not conversations:
        raise InputError(f"{path} holds no conversations; give JSON lines in one of these formats: {FORMATS}")
    merged = _without_beginnings(conversations)
    if len(merged) < len(conversations):
        count = len(conversations) - len(merged)
        log.info("%s: %d of %d conversations are the beginning of others", path, count, len(conversations))
    return merged


def conversation_from(record: Any, origin: str) -> Conversation:
    """The conversation of a record in one of the formats. Raises PalestraError, or ValueError and its like."""
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    chat = _to_chat(record)
    return conversation_of(chat["messages"], chat["tools"], origin)


def _to_chat(record: Json) -> Json:
    """A record in OpenAI's chat form. Raises ValueError and its like for what cannot be converted."""
    if "prompt" in record and "completion" in record:
        asked, said = record["prompt"], record["completion"]  # TRL's form: texts or messages
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        said = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
        # what the assistant says in the prompt is not trained
        asked = [{**message, "weight": 0} if message.get("role") == "assistant" else message for message in asked]
        record = {**record, "messages": [*asked, *said]}
    if not isinstance(record.get("messages"), list):
        for key in _REMOVED.keys() & record.keys():
            raise ValueError(
                f'{_REMOVED[key]} files {{"{key}": […]}} are no longer read; convert each to OpenAI\'s form, '
                '{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}], "tools": […]}'
            )
        raise ValueError(f"the format of an object with the keys {sorted(record)} is not known; use {FORMATS}")
    blocks = [b for m in record["messages"] if isinstance(m.get("content"), list) for b in m["content"]]
    tools = record.get("tools")
    has_schemas = isinstance(tools, list) and any("input_schema" in tool for tool in tools)
    if "system" in record or has_schemas or any(block.get("type") in ANTHROPIC_BLOCKS for block in blocks):
        return provided("traces of other programs")(record)
    return {"messages": list(map(_without_function_call, record["messages"])), "tools": chat_tools(tools)}


def _without_function_call(message: Json) -> Json:
    """OpenAI's form before `tool_calls`: one `function_call`, answered by the role `function`."""
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if message.get("function_call"):
        return {**message, "tool_calls": [{"type": "function", "function": message["function_call"]}]}
    return message


def chat_tools(tools: Any) -> list[Json]:
    """Schemas in the form of chat templates; datasets often have them as JSON text."""
    if isinstance(tools, str):
        tools = read_json(tools) if tools.strip() else []
    if not isinstance(tools or [], list):
        raise ValueError('"tools" is not a list of schemas')
    schemas = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
    for tool in schemas:
        if not isinstance(tool["function"].get("name"), str):
            raise ValueError(f"a tool has no name: {tool!r:.100}; only function tools are supported")
    return schemas


def conversation_of(
    messages: Sequence[Mapping[str, Any] | Message], tools: Sequence[dict[str, Any]] = (), origin: str = "an example"
) -> Conversation:
    """The conversation of messages in OpenAI's form, checked: roles, weights, calls and their results."""
    found: list[Message] = []
    untrained: set[int] = set()
    for i, given in enumerate(messages):
        if not isinstance(given, Mapping | Message):
            raise ValueError(f"message {i} is {given!r:.100}; expected an object with `role` and `content`")
        row, message = ({}, given) if isinstance(given, Message) else (given, from_dict(given))
        if message.role == "assistant":
            weight = row.get("weight")
            if weight not in (None, 0, 1):
                raise ValueError(f"message {i} has the weight {weight!r}; expected 0 (not trained) or 1")
            if weight == 0:
                untrained.add(i)
        elif row.get("weight") is not None or message.tool_calls:
            key = "weight" if row.get("weight") is not None else "tool_calls"
            raise ValueError(f"message {i} of the role {message.role} has {key!r}, which only an assistant's may have")
        found.append(message)
    named = tuple(_with_results_named(found))
    answers = [i for i, message in enumerate(named) if message.role == "assistant"]
    if not answers:
        raise ValueError("it has no assistant message, so there is nothing to learn from; add the answer")
    if set(answers) <= untrained:
        raise ValueError('every assistant message has "weight": 0, so there is nothing to learn from; take one out')
    if answers[0] == 0:
        raise ValueError("it begins with an assistant message; put a user or system message in front")
    return Conversation(named, tuple(tools), origin, frozenset(untrained))


def _with_results_named(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with the id and the name of its call in each tool result; ValueError where they do not match."""
    waiting: dict[str, ToolCall] = {}
    for i, message in enumerate(messages):
        if message.role != "tool" and waiting:
            raise ValueError(f"the call of {_names(waiting)} has no result before message {i}; add a tool message")
        if message.role == "assistant":
            for made in message.tool_calls:
                if made.error is not None or not made.name:
                    raise ValueError(f"message {i}: {made.error or 'a tool call has no name'}")
            waiting = {call.id: call for call in message.tool_calls}
            if len(waiting) < len(message.tool_calls):
                raise ValueError(f"two calls of message {i} have the same id; give each its own")
        elif message.role == "tool":
            call_id = next(iter(waiting), None) if message.tool_call_id is None else message.tool_call_id
            call = waiting.pop(str(call_id), None)
            if call is None:
                known = f"expected a result of {_names(waiting)}" if waiting else "no call waits for a result there"
                raise ValueError(f"message {i} is the result of call {message.tool_call_id!r}; {known}")
            message = replace(message, tool_call_id=call.id, name=call.name)
        yield message


def _names(calls: Mapping[str, ToolCall]) -> str:
    return ", ".join(f"{call.name} (id {call.id!r})" for call in calls.values())


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Each JSON value with its place in the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UnreadableFileError(
            f"the conversations in {path} cannot be read ({reason}); give a JSON-lines file"
        ) from None
    try:
        whole = read_json(text)
    except ValueError:
        for number, line in enumerate(text.split("\n"), start=1):  # not splitlines(): JSON may hold other separators
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", read_json(line)
            except ValueError as error:
                raise UnreadableFileError(
                    f"{path}, line {number} is not valid JSON ({error}); write one JSON object per line, "
                    "or one JSON document"
                ) from None
        return
    if isinstance(whole, list):
        yield from ((f"{path}, entry {i}", each) for i, each in enumerate(whole, start=1))
    else:
        yield f"{path}, line {1 + text[: len(text) - len(text.lstrip())].count(chr(10))}", whole


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"the key {error.args[0]!r} is missing"
    is_ours = isinstance(error, PalestraError | ValueError)
    return str(error).rstrip(".") if is_ours else f"a value has the wrong type ({error})"


def _without_beginnings(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Without conversations that others begin with; their reasoning is added to those that leave it out."""
    beginnings: dict[int, int] = {}  # hash of a beginning -> place of the conversation that continues it
    wholes = []
    for place, conversation in enumerate(conversations):
        key = hash(json.dumps(conversation.tools, sort_keys=True))
        for i, message in enumerate(conversation.messages):
            if i and message.role != "assistant":
                beginnings[key] = place
            key = hash((key, i in conversation.untrained, json.dumps(to_dict(message), sort_keys=True)))
        wholes.append(key)
    merged = list(conversations)
    for place in sorted(range(len(wholes)), key=lambda place: len(conversations[place].messages)):
        if (longer := beginnings.get(wholes[place])) is not None:
            known = chain((message.reasoning for message in merged[place].messages), repeat(""))
            both = zip(merged[longer].messages, known, strict=False)
            messages = tuple(replace(message, reasoning=message.reasoning or own) for message, own in both)
            merged[longer] = replace(merged[longer], messages=messages)
    return [each for each, key in zip(merged, wholes, strict=True) if key not in beginnings]
