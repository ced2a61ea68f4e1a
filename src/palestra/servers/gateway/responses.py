"""OpenAI's Responses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import Field, PrivateAttr

from palestra.core.errors import InputError, NotFoundError, UnsupportedError
from palestra.core.messages import from_dict
from palestra.core.types import Message
from palestra.models.chat.streaming import Delta
from palestra.servers.gateway.chat_completions import chat_logprobs
from palestra.servers.gateway.request import (
    ChatAnswer,
    ChatRequest,
    Event,
    Piece,
    PromptSize,
    RequestForm,
    SamplingFields,
    function_tool,
    grammar_of,
    json_schema,
    openai_choice,
    short,
)
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer

# Accepted where they ask for what is done anyway.
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

_MAX_STORED = 1 << 26  # characters


@dataclass(slots=True)
class StoredResponses:
    """The messages up to each response, for `previous_response_id`. The oldest are dropped above _MAX_STORED."""

    _messages: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    _characters: int = 0

    def __getitem__(self, response_id: str) -> tuple[Message, ...]:
        if response_id not in self._messages:
            raise NotFoundError(f"previous_response_id={short(response_id)} is no response that is stored here")
        return self._messages[response_id]

    def __setitem__(self, response_id: str, messages: tuple[Message, ...]) -> None:
        self._messages[response_id] = messages
        self._characters += _characters(messages)
        while self._characters > _MAX_STORED:
            self._characters -= _characters(self._messages.pop(next(iter(self._messages))))


def _characters(messages: Sequence[Message]) -> int:
    return sum(100 + len(message.text) + len(repr(message.tool_calls)) for message in messages)


class ResponseBody(RequestForm):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    _stored: StoredResponses = PrivateAttr(default_factory=StoredResponses)
    _history: tuple[Message, ...] = PrivateAttr(default=())

    @classmethod
    def read(cls, raw: dict[str, Any], stored: StoredResponses | None = None) -> Self:
        body = super().read(raw)
        body._stored = body._stored if stored is None else stored
        return body

    def request(self, model: Completer) -> ChatRequest:
        for name, value, allowed in (
            ("background", self.background, (None, False)),
            ("truncation", self.truncation, (None, "disabled", "auto")),
            *(("include", each, _INCLUDED) for each in self.include or ()),
        ):
            if value not in allowed:
                raise UnsupportedError(f"{name}={short(value)} is not supported by this server; leave it out")
        before = () if self.previous_response_id is None else self._stored[self.previous_response_id]
        self._history = (*before, *input_messages(self.input))
        system = (Message("system", self.instructions),) if self.instructions else ()
        tools = tuple(function_tool({"type": tool.get("type"), "function": tool}) for tool in self.tools or ())
        choice = openai_choice(self.tool_choice, self.parallel_tool_calls)
        schema = json_schema((self.text or {}).get("format"), "text.format")
        effort = (self.reasoning or {}).get("effort")
        variables = {} if effort is None else {"reasoning_effort": effort}
        if not (system + self._history):
            raise InputError("the input is empty; send a text or at least one item")
        return ChatRequest(
            (*system, *self._history),
            SamplingFields(max_tokens=self.max_output_tokens, temperature=self.temperature, top_p=self.top_p),
            tools,
            variables,
            reads_calls=choice.mode != "none",
            grammar=grammar_of(model, tools, choice, schema, variables),
            top_logprobs=self.top_logprobs or 0,
        )

    def response(self, answers: Sequence[ChatAnswer], model: Completer) -> dict[str, Any]:
        (answer,) = answers
        frame = _Frame(self, model)
        return frame.ended(answer, frame.output(answer))

    async def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]:
        frame = _Frame(self, model)
        async for _, piece in pieces:
            if isinstance(piece, PromptSize):
                yield frame.event("response.created", response=frame.response("in_progress", []))
                yield frame.event("response.in_progress", response=frame.response("in_progress", []))
            elif isinstance(piece, Delta) and not piece.is_thinking:
                for event in frame.open_message(0):
                    yield event
                place = {"item_id": frame.message_id, "output_index": 0, "content_index": 0}
                yield frame.event("response.output_text.delta", **place, delta=piece.text, logprobs=[])
            elif isinstance(piece, ChatAnswer):
                output = frame.output(piece)
                for event in frame.end_events(output):
                    yield event
                whole = frame.ended(piece, output)
                yield frame.event(f"response.{whole['status']}", response=whole)


@dataclass(slots=True)
class _Frame:
    """One response and its events. Text comes piece by piece; the other items are whole when they come."""

    _body: ResponseBody
    _model: Completer
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _created: int = field(default_factory=lambda: int(time.time()))
    _sequence: int = -1
    _has_text: bool = False

    def response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model.name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "metadata": {},
            **more,
        }

    def ended(self, answer: ChatAnswer, output: list[dict[str, Any]]) -> dict[str, Any]:
        sampled = len(answer.completion.token_ids)
        usage = {
            "input_tokens": answer.size.tokens,
            "input_tokens_details": {"cached_tokens": answer.size.cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.size.tokens + sampled,
        }
        if answer.is_cut_off:
            why = {"reason": "max_output_tokens"}
            return self.response("incomplete", output, usage=usage, incomplete_details=why)
        return self.response("completed", output, usage=usage)

    def event(self, name: str, /, **fields: Any) -> Event:
        self._sequence += 1
        return Event({"type": name, "sequence_number": self._sequence, **fields}, name)

    def output(self, answer: ChatAnswer) -> list[dict[str, Any]]:
        """Thinking, text and calls, in the order in which models write them; stored for later requests."""
        body, message, items = self._body, answer.message, list[dict[str, Any]]()
        if body.store is not False:
            body._stored[self.id] = (*body._history, message)
        if answer.thinking:
            thought = [{"type": "reasoning_text", "text": answer.thinking}]
            items.append({"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": thought})
        status = "incomplete" if answer.is_cut_off else "completed"
        if message.text or not message.tool_calls:
            with_logprobs = bool(body.top_logprobs) or _INCLUDED[0] in (body.include or ())
            logprobs = chat_logprobs(answer.completion, self._model)["content"] if with_logprobs else []
            part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": logprobs}
            about = {"id": self.message_id, "type": "message", "role": "assistant", "status": status}
            items.append({**about, "content": [part]})
        for call in message.tool_calls:
            about = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": status, "call_id": call.id}
            items.append({**about, "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)})
        return items

    def end_events(self, output: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """The items that were not sent yet. A reasoning item comes after a message that was sent before it."""
        began = [item for item in output if self._has_text and item["type"] == "message"]
        for index, item in enumerate([*began, *(item for item in output if item not in began)]):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                yield from self.open_message(index)
                (part,) = item["content"]
                whole = {**place, "content_index": 0}
                yield self.event("response.output_text.done", **whole, text=part["text"], logprobs=[])
                yield self.event("response.content_part.done", **whole, part=part)
            elif item["type"] == "function_call":
                begun = {**item, "arguments": "", "status": "in_progress"}
                yield self.event("response.output_item.added", output_index=index, item=begun)
                name, arguments = item["name"], item["arguments"]
                yield self.event("response.function_call_arguments.delta", **place, delta=arguments)
                yield self.event("response.function_call_arguments.done", **place, arguments=arguments, name=name)
            else:
                yield self.event("response.output_item.added", output_index=index, item=item)
            yield self.event("response.output_item.done", output_index=index, item=item)

    def open_message(self, index: int) -> Iterator[Event]:
        """The events before the first text of the message; none where they were sent."""
        if self._has_text:
            return
        self._has_text = True
        item = {"id": self.message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        place = {"item_id": self.message_id, "output_index": index, "content_index": 0}
        yield self.event("response.output_item.added", output_index=index, item=item)
        yield self.event("response.content_part.added", **place, part=part)


def input_messages(items: str | Sequence[dict[str, Any]]) -> list[Message]:
    """An assistant's message and the function calls behind it are one message, as the model said it."""
    if isinstance(items, str):
        return [Message("user", items)]
    rows: list[dict[str, Any]] = []
    speaks = False  # the last item was the assistant's: calls join it
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            if not speaks:
                rows.append({"role": "assistant", "content": "", "tool_calls": []})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            rows[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        elif kind == "function_call_output":
            rows.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        elif kind == "message":
            rows.append({"role": item.get("role"), "content": item.get("content")})
        elif kind != "reasoning":
            raise UnsupportedError(f"input.{i}: an item of type {short(kind)} is not supported; leave it out")
        speaks = kind == "function_call" or (kind == "message" and item.get("role") == "assistant")
    try:
        return [from_dict(message) for message in rows]
    except (TypeError, AttributeError) as error:
        raise InputError(f"input: not in the form of a conversation ({error})") from None
