"""One exchange with a chat API, in any of three dialects, as a line of chat JSONL.

Unknown parts (images, the provider's own tools) stay in the line as they were sent.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from palestra.extras.record.trace_formats import (
    anthropic_messages,
    anthropic_reply,
    chat_call,
    chat_tool,
    text_of_parts,
)

Dialect = Literal["chat", "responses", "messages"]
Json = dict[str, Any]
_PATHS: dict[str, Dialect] = {"/chat/completions": "chat", "/responses": "responses", "/messages": "messages"}
_MAX_REMEMBERED = 4096  # responses that a later request may go on from by their id


def dialect_of(path: str) -> Dialect | None:
    """The dialect of a URL's path; None if it has none.

    >>> dialect_of("/v1/chat/completions"), dialect_of("/v1/models")
    ('chat', None)
    """
    return next((dialect for end, dialect in _PATHS.items() if path.endswith(end)), None)


class Traces:
    """Converts exchanges to lines. Stores responses, which later requests refer to by id."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, list[Json]] = OrderedDict()

    def lines(self, dialect: Dialect, request: Json, answer: Json) -> list[Json]:
        """One line for each choice: the messages with the answer behind them, and the tools, in OpenAI's chat form."""
        match dialect:
            case "chat":
                messages = list(request.get("messages") or ())
                replies = [choice.get("message") or {} for choice in answer.get("choices") or ()]
                tools = list(request.get("tools") or ())
            case "responses":
                messages, replies, tools = self._from_responses(request, answer)
            case "messages":
                messages = list(anthropic_messages(request))
                replies = [anthropic_reply(answer.get("content") or ())]
                tools = [
                    chat_tool(t.get("name"), t.get("description"), t.get("input_schema"))
                    for t in request.get("tools") or ()
                ]
        about = {"model": answer.get("model") or request.get("model"), "dialect": dialect, "usage": answer.get("usage")}
        # the messages before the model's first one, so that a trace is a case as well
        first = next((i for i, m in enumerate(messages) if m.get("role") in ("assistant", "tool")), len(messages))
        return [
            {"messages": [*messages, _without_nothing(reply)], "tools": tools, "input": messages[:first], **about}
            for reply in replies
        ]

    def _from_responses(self, request: Json, answer: Json) -> tuple[list[Json], list[Json], list[Json]]:
        before = self._responses.get(str(request.get("previous_response_id")), [])
        prompt = request.get("input")
        items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or ())
        history = [*before, *_items_as_messages(items)]
        (reply,) = _items_as_messages(answer.get("output") or ()) or [{"role": "assistant", "content": ""}]
        if answer.get("id"):
            self._responses[str(answer["id"])] = [*history, reply]
            while len(self._responses) > _MAX_REMEMBERED:
                self._responses.popitem(last=False)
        system = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
        tools = [
            chat_tool(t.get("name"), t.get("description"), t.get("parameters")) if t.get("type") == "function" else t
            for t in request.get("tools") or ()
        ]
        return [*system, *history], [reply], tools


def read_answer(dialect: Dialect, content_type: str, body: bytes) -> Json:
    """The whole answer, assembled if it was streamed. Raises ValueError if it is invalid."""
    if "text/event-stream" not in content_type:
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return answer
    events = list(_events(body))
    match dialect:
        case "chat":
            return _chat_stream(events)
        case "responses":
            return next(e["response"] for e in reversed(events) if isinstance(e.get("response"), dict))
        case "messages":
            return _anthropic_stream(events)


def _events(body: bytes) -> Iterator[Json]:
    """The data of server-sent events."""
    for block in body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]":
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def _chat_stream(events: Sequence[Json]) -> Json:
    whole: Json = {"choices": []}
    messages: dict[int, Json] = {}
    for event in events:
        whole |= {key: event[key] for key in ("id", "model", "usage") if event.get(key) is not None}
        for choice in event.get("choices") or ():
            message = messages.setdefault(choice.get("index", 0), {"role": "assistant", "content": ""})
            _add_delta(message, choice.get("delta") or {})
    whole["choices"] = [{"message": messages[i]} for i in sorted(messages)]
    return whole


def _add_delta(message: Json, delta: Json) -> None:
    for key in ("content", "reasoning_content", "refusal"):
        if delta.get(key):
            message[key] = (message.get(key) or "") + delta[key]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        at = part.get("index", len(calls))
        while len(calls) <= at:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        calls[at]["id"] = part.get("id") or calls[at]["id"]
        for key, text in (part.get("function") or {}).items():
            calls[at]["function"][key] = calls[at]["function"].get(key, "") + (text or "")


def _anthropic_stream(events: Sequence[Json]) -> Json:
    whole: Json = {"content": []}
    inputs: dict[int, str] = {}
    for event in events:
        blocks = whole["content"]
        match event.get("type"):
            case "message_start":
                whole = {**event["message"], "content": []}
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for key in ("text", "thinking", "signature"):
                    if key in delta:
                        block[key] = block.get(key, "") + delta[key]
                if "partial_json" in delta:
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "message_delta":
                whole |= event.get("delta") or {}
                whole["usage"] = {**(whole.get("usage") or {}), **(event.get("usage") or {})}
    for index, text in inputs.items():
        whole["content"][index]["input"] = json.loads(text or "{}")
    return whole


def _items_as_messages(items: Sequence[Json]) -> list[Json]:
    """Items of the Responses API; an assistant's text and the calls behind it are one message."""
    messages: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        own = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "function_call":
            if own is None:
                own = {"role": "assistant", "content": ""}
                messages.append(own)
            call = chat_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            own.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": text_of_parts(item.get("output"))}
            )
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": text_of_parts(item.get("content"))})
    return messages


def _without_nothing(message: Json) -> Json:
    content = message.get("content") or ""
    return {"role": "assistant", "content": content} | {k: v for k, v in message.items() if v and k != "content"}
