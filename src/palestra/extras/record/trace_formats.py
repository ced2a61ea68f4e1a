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
from contextlib import suppress
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


# Anthropic


def _from_anthropic(record: Json) -> Json:
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


# ShareGPT


def _from_sharegpt(record: Json) -> Json:
    messages: list[Json] = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    waiting = 0  # calls without a result so far
    for turn in record["conversations"]:
        role, value = _SHAREGPT_ROLES.get(str(turn.get("from"))), turn.get("value")
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise ValueError(f'a turn has "from": {turn.get("from")!r}; expected one of {known}')
        if not isinstance(value, str):
            raise ValueError('a turn has no text in "value"')
        if role == "tool":
            for text in _tagged(value, "tool_response")[1] or [value]:
                results = _results(waiting, text)
                messages += results
                waiting -= len(results)
            continue
        calls = [value]
        if role != "function_call":
            text, calls = _tagged(value, "tool_call") if role == "assistant" else (value, [])
            messages.append({"role": role, "content": text.strip() if calls else value, "weight": turn.get("weight")})
        elif not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": "", "weight": turn.get("weight")})
        for call in calls:
            _add_calls(messages[-1].setdefault("tool_calls", []), call)
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


def _add_calls(own: list[Json], text: str) -> None:
    """Add calls of JSON text, one or a list, to those of an assistant's message."""
    try:
        value = read_json(text)
    except ValueError as error:
        try:
            value = literal_eval(text)  # some datasets have Python's dicts
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"a function call is not JSON ({error}): {text!r:.100}") from None
    for call in value if isinstance(value, list) else [value]:
        own.append(_call(f"call_{len(own)}", call["name"], call.get("arguments") or {}))


def _results(waiting: int, value: str) -> list[Json]:
    """One result or, for parallel calls in one observation, a JSON list with one entry for each."""
    texts = [value]
    if waiting > 1 and value.lstrip().startswith("["):
        with suppress(ValueError):
            if len(values := read_json(value)) == waiting:
                texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
    return [{"role": "tool", "content": text} for text in texts]


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
        given = step.get("tool_calls") or ()
        calls = [_call(call["tool_call_id"], call["function_name"], call.get("arguments") or {}) for call in given]
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
        role = "user" if call_id is None and not calls else "tool"
        yield {"role": role, "content": content} | ({} if call_id is None else {"tool_call_id": call_id})


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
