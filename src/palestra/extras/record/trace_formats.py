"""Conversations in Anthropic's form -> OpenAI's chat form: `{"messages": […], "tools": […]}`.

`Traces` does so for each exchange with a chat API, where unknown parts (images, the provider's own tools) stay as sent.

Functions here raise ValueError for what they cannot convert; a wrong type may also raise AttributeError, KeyError or
TypeError. `core.conversations` reports both with the file and the line.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from palestra.core.conversations import ANTHROPIC_BLOCKS

Json = dict[str, Any]


def _call(call_id: Any, name: Any, arguments: Any) -> Json:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _tool(schema: Json, parameters: str) -> Json:
    """A tool's schema of another API, which has its parameters under the key `parameters`."""
    function = {"name": schema.get("name"), "description": schema.get("description")}
    return {"type": "function", "function": {**function, "parameters": schema.get(parameters)}}


def _text(content: Any) -> Any:
    """The text of content parts; content with other parts stays as it was sent."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content  # type: ignore[arg-type]


def to_chat(record: Json) -> Json:
    """An Anthropic record in OpenAI's chat form."""
    for message in record["messages"]:
        content = message.get("content")
        if message.get("role") not in ("user", "assistant"):
            raise ValueError(f"a message has the role {message.get('role')!r}; Anthropic's are user and assistant")
        for block in content if isinstance(content, list) else ():
            if block.get("type") not in ("text", *ANTHROPIC_BLOCKS):
                raise ValueError(f"a content block of the type {block.get('type')!r} cannot be trained; take it out")
    return {"messages": list(_anthropic_messages(record)), "tools": _anthropic_tools(record)}


def _anthropic_tools(request: Json) -> list[Json]:
    return [_tool(schema, "input_schema") for schema in request.get("tools") or ()]


def _anthropic_messages(request: Json) -> Iterator[Json]:
    """The messages of an Anthropic request; a tool result becomes a message of its own."""
    if request.get("system"):
        yield {"role": "system", "content": _text(request["system"])}
    for message in request.get("messages") or ():
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "assistant":
            yield _anthropic_reply(content or ())
        else:
            rest = []
            for block in content or ():
                if block.get("type") == "tool_result":
                    text = _text(block.get("content"))
                    yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
                else:
                    rest.append(block)
            if rest:
                yield {"role": "user", "content": _text(rest)}


def _anthropic_reply(blocks: Sequence[Json]) -> Json:
    """The assistant message of Anthropic content blocks."""
    calls = [_call(b.get("id"), b.get("name"), b.get("input")) for b in blocks if b.get("type") == "tool_use"]
    text, thinking = ("".join(b.get(k, "") for b in blocks if b.get("type") == k) for k in ("text", "thinking"))
    return {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": thinking}


Dialect = Literal["chat", "responses", "messages"]
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
                messages, replies = self._from_responses(request, answer)
                asked = request.get("tools") or ()
                tools = [_tool(t, "parameters") if t.get("type") == "function" else t for t in asked]
            case "messages":
                messages = list(_anthropic_messages(request))
                replies = [_anthropic_reply(answer.get("content") or ())]
                tools = _anthropic_tools(request)
        about = {"model": answer.get("model") or request.get("model"), "dialect": dialect, "usage": answer.get("usage")}
        # the messages before the model's first one, so that a trace is a case as well
        first = next((i for i, m in enumerate(messages) if m.get("role") in ("assistant", "tool")), len(messages))
        lines = []
        for reply in replies:
            said = {"role": "assistant", "content": reply.get("content") or ""}
            said |= {key: value for key, value in reply.items() if value and key != "content"}
            lines.append({"messages": [*messages, said], "tools": tools, "input": messages[:first], **about})
        return lines

    def _from_responses(self, request: Json, answer: Json) -> tuple[list[Json], list[Json]]:
        before = self._responses.get(str(request.get("previous_response_id")), [])
        prompt = request.get("input") or ()
        items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        history = [*before, *_messages_of_items(items)]
        (reply,) = _messages_of_items(answer.get("output") or ()) or [{"role": "assistant", "content": ""}]
        if answer.get("id"):
            self._responses[str(answer["id"])] = [*history, reply]
            while len(self._responses) > _MAX_REMEMBERED:
                self._responses.popitem(last=False)
        system = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
        return [*system, *history], [reply]


def _messages_of_items(items: Sequence[Json]) -> list[Json]:
    """Items of the Responses API; an assistant's text and the calls behind it are one message."""
    messages: list[Json] = []
    for item in items:
        match item.get("type", "message"):
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result = {"tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
                messages.append({"role": "tool", **result})
            case "message":
                messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
    return messages


def read_answer(dialect: Dialect, content_type: str, body: bytes) -> Json:
    """The whole answer, assembled if it was streamed. Raises ValueError if it is invalid."""
    if "text/event-stream" not in content_type:
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError("the answer is no JSON object")
        return answer
    events = []
    for block in body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:"))
        if data and data != "[DONE]" and isinstance(event := json.loads(data), dict):
            events.append(event)
    match dialect:
        case "chat":
            return _chat_stream(events)
        case "responses":
            return next(e["response"] for e in reversed(events) if isinstance(e.get("response"), dict))
        case "messages":
            return _anthropic_stream(events)


def _append(whole: Json, delta: Json, *names: str) -> None:
    """Append the texts of a delta to those that came before."""
    for name in names:
        if delta.get(name):
            whole[name] = (whole.get(name) or "") + delta[name]


def _chat_stream(events: Sequence[Json]) -> Json:
    whole: Json = {}
    messages: dict[int, Json] = {}
    for event in events:
        whole |= {key: event[key] for key in ("id", "model", "usage") if event.get(key) is not None}
        for choice in event.get("choices") or ():
            message = messages.setdefault(choice.get("index", 0), {"role": "assistant", "content": ""})
            delta = choice.get("delta") or {}
            _append(message, delta, "content", "reasoning_content", "refusal")
            for part in delta.get("tool_calls") or ():
                calls = message.setdefault("tool_calls", [])
                at = part.get("index", len(calls))
                calls += [_call(None, "", "") for _ in range(at + 1 - len(calls))]
                calls[at]["id"] = part.get("id") or calls[at]["id"]
                _append(calls[at]["function"], part.get("function") or {}, *(part.get("function") or ()))
    return whole | {"choices": [{"message": messages[i]} for i in sorted(messages)]}


def _anthropic_stream(events: Sequence[Json]) -> Json:
    whole: Json = {}
    blocks: list[Json] = []
    for event in events:
        match event.get("type"):
            case "message_start":
                whole = event["message"]
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                _append(blocks[event["index"]], event["delta"], "text", "thinking", "signature", "partial_json")
            case "message_delta":
                used = {**(whole.get("usage") or {}), **(event.get("usage") or {})}
                whole = {**whole, **(event.get("delta") or {}), "usage": used}
    for block in blocks:
        if text := block.pop("partial_json", ""):
            block["input"] = json.loads(text)
    return whole | {"content": blocks}
