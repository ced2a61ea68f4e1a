"""Conversations in the formats of other tools -> OpenAI's chat form: `{"messages": […], "tools": […]}`.

`Traces` does so for each exchange with a chat API, where unknown parts (images, the provider's own tools) stay as sent.

Functions here raise ValueError for what they cannot convert; a wrong type may also raise AttributeError, KeyError or
TypeError. `core.conversations` reports both with the file and the line.
"""

from __future__ import annotations

import json
from ast import literal_eval
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from palestra.core.conversations import ANTHROPIC_BLOCKS, chat_tools
from palestra.core.text import read_json

Json = dict[str, Any]
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "function_call",
    "observation": "tool",
    "tool": "tool",
}
_ATIF_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def to_chat(record: Json) -> Json:
    """An ATIF, ShareGPT or Anthropic record in OpenAI's chat form."""
    if "steps" in record:
        return _from_atif(record)
    return _from_sharegpt(record) if "conversations" in record else _from_anthropic(record)


# Anthropic


def _from_anthropic(record: Json) -> Json:
    for message in record["messages"]:
        content = message.get("content")
        if message.get("role") not in ("user", "assistant"):
            raise ValueError(f"a message has the role {message.get('role')!r}; Anthropic's are user and assistant")
        for block in content if isinstance(content, list) else ():
            if block.get("type") not in ("text", *ANTHROPIC_BLOCKS):
                raise ValueError(f"a content block of the type {block.get('type')!r} cannot be trained; take it out")
    return {"messages": list(anthropic_messages(record)), "tools": _anthropic_tools(record)}


def _anthropic_tools(request: Json) -> list[Json]:
    tools = request.get("tools") or ()
    return [chat_tool(t.get("name"), t.get("description"), t.get("input_schema")) for t in tools]


def anthropic_messages(request: Json) -> Iterator[Json]:
    """The messages of an Anthropic request; a tool result becomes a message of its own."""
    if request.get("system"):
        yield {"role": "system", "content": text_of_parts(request["system"])}
    for message in request.get("messages") or ():
        content = message.get("content")
        if isinstance(content, str):
            yield {"role": message.get("role"), "content": content}
        elif message.get("role") == "assistant":
            yield anthropic_reply(content or ())
        else:
            for block in content or ():
                if block.get("type") == "tool_result":
                    text = text_of_parts(block.get("content"))
                    yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            if rest := [block for block in content or () if block.get("type") != "tool_result"]:
                yield {"role": "user", "content": text_of_parts(rest)}


def anthropic_reply(blocks: Sequence[Json]) -> Json:
    """The assistant message of Anthropic content blocks."""
    calls = [chat_call(b.get("id"), b.get("name"), b.get("input")) for b in blocks if b.get("type") == "tool_use"]
    thinking = "".join(b.get("thinking", "") for b in blocks if b.get("type") == "thinking")
    text = "".join(b.get("text", "") for b in blocks if b.get("type") == "text")
    return {"role": "assistant", "content": text, "tool_calls": calls, "reasoning_content": thinking}


def chat_call(call_id: Any, name: Any, arguments: Any) -> Json:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def chat_tool(name: Any, description: Any, parameters: Any) -> Json:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_of_parts(content: Any) -> Any:
    """The text of content parts; content with other parts stays as it was sent."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content  # type: ignore[arg-type]


# ShareGPT


def _from_sharegpt(record: Json) -> Json:
    messages: list[Json] = []
    waiting = 0  # calls without a result so far
    if record.get("system"):
        messages.append({"role": "system", "content": record["system"]})
    for turn in record["conversations"]:
        role = _SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise ValueError(f'a turn has "from": {turn.get("from")!r}; expected one of {known}')
        if not isinstance(turn.get("value"), str):
            raise ValueError('a turn has no text in "value"')
        if role == "function_call":
            _add_calls(messages, turn)
        elif role == "tool":
            for value in _tagged(turn["value"], "tool_response")[1] or [turn["value"]]:
                results = _results(waiting, value)
                messages += results
                waiting -= len(results)
            continue
        elif role == "assistant" and (tagged := _tagged(turn["value"], "tool_call"))[1]:
            messages.append({"role": role, "content": tagged[0].strip(), "weight": turn.get("weight")})
            for call in tagged[1]:
                _add_calls(messages, {"value": call})
        else:
            messages.append({"role": role, "content": turn["value"], "weight": turn.get("weight")})
        waiting = len(messages[-1].get("tool_calls") or ())
    return {"messages": messages, "tools": chat_tools(record.get("tools"))}


def _tagged(text: str, tag: str) -> tuple[str, list[str]]:
    """The text outside of pairs of a tag, and what stands in each pair, without the whitespace around it."""
    outside, inside = list[str](), list[str]()
    *pieces, rest = text.split(f"</{tag}>")
    for piece in pieces:
        before, opened, body = piece.partition(f"<{tag}>")
        outside.append(before if opened else f"{piece}</{tag}>")
        inside += [body.strip()] if opened else []
    return "".join([*outside, rest]), inside


def _add_calls(messages: list[Json], turn: Json) -> None:
    """Calls as JSON text, one or a list, belong to the assistant's text before them."""
    try:
        value = read_json(turn["value"])
    except ValueError as error:
        try:
            value = literal_eval(turn["value"])  # some datasets have Python's dicts
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"a function call is not JSON ({error}): {turn['value']!r:.100}") from None
    calls = value if isinstance(value, list) else [value]
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "weight": turn.get("weight")})
    own = messages[-1].setdefault("tool_calls", [])
    for call in calls:
        own.append(chat_call(f"call_{len(own)}", call["name"], call.get("arguments") or {}))


def _results(waiting: int, value: str) -> list[Json]:
    """One result or, for parallel calls in one observation, a JSON list with one entry for each."""
    if waiting > 1 and value.lstrip().startswith("["):
        try:
            values = read_json(value)
        except ValueError:
            values = []
        if len(values) == waiting:
            texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
            return [{"role": "tool", "content": text} for text in texts]
    return [{"role": "tool", "content": value}]


# ATIF: https://github.com/laude-institute/harbor, docs/rfcs/0001-trajectory-format.md


def _from_atif(record: Json) -> Json:
    version = str(record.get("schema_version"))
    if not version.startswith("ATIF-v1"):
        raise ValueError(f'"schema_version" is {version!r}; expected ATIF-v1.0 or a later version of 1')
    messages: list[Json] = []
    for step in record["steps"]:
        role = _ATIF_ROLES.get(str(step.get("source")))
        if role is None:
            raise ValueError(f'a step has "source": {step.get("source")!r}; expected system, user or agent')
        calls = [
            chat_call(call["tool_call_id"], call["function_name"], call.get("arguments") or {})
            for call in step.get("tool_calls") or ()
        ]
        message: Json = {"role": role, "content": step.get("message")}
        if role == "assistant":
            message |= {"tool_calls": calls, "reasoning_content": step.get("reasoning_content")}
            message |= {"weight": 0} if step.get("is_copied_context") else {}
        messages += [message, *_atif_results(step, calls)]
    tools = (record.get("agent") or {}).get("tool_definitions") or record.get("tools")
    return {"messages": messages, "tools": chat_tools(tools)}


def _atif_results(step: Json, calls: Sequence[Json]) -> Iterator[Json]:
    """Results of calls; what came back without a call is what the agent read next, so a user message."""
    for result in (step.get("observation") or {}).get("results") or ():
        content, call_id = result.get("content"), result.get("source_call_id")
        if content is None and result.get("subagent_trajectory_ref"):
            raise ValueError("a result refers to a subagent's trajectory and has no content; give what the agent read")
        if call_id is None and not calls:
            yield {"role": "user", "content": content}
        else:
            yield {"role": "tool", "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


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
                messages, replies, tools = self._from_responses(request, answer)
            case "messages":
                messages = list(anthropic_messages(request))
                replies = [anthropic_reply(answer.get("content") or ())]
                tools = _anthropic_tools(request)
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
