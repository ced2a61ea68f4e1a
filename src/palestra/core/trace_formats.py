"""Conversations in the formats of other tools -> OpenAI's chat form: `{"messages": […], "tools": […]}`.

Functions here raise ValueError for what they cannot convert; a wrong type may also raise AttributeError, KeyError or
TypeError. `core.conversations` reports both with the file and the line.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from typing import Any

from palestra.core.text import read_json

Json = dict[str, Any]
FORMATS = (
    'OpenAI chat {"messages": […], "tools": […]}, TRL {"prompt": …, "completion": …}, Anthropic {"system": …, '
    '"messages": […]}, ShareGPT {"conversations": […]} and ATIF {"schema_version": "ATIF-v1.4", "steps": […]}'
)
_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
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
_HERMES_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_HERMES_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_ATIF_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


def to_chat(record: Json) -> Json:
    """A record of any of the five formats in OpenAI's chat form."""
    if "steps" in record:
        return _from_atif(record)
    if "conversations" in record:
        return _from_sharegpt(record)
    if "prompt" in record and "completion" in record:
        record = {**record, "messages": _prompt_and_completion(record["prompt"], record["completion"])}
    if not isinstance(record.get("messages"), list):
        raise ValueError(f"the format of an object with the keys {sorted(record)} is not known; use {FORMATS}")
    if _is_anthropic(record):
        return _from_anthropic(record)
    return {"messages": list(map(_without_function_call, record["messages"])), "tools": _tools(record.get("tools"))}


# Anthropic


def _is_anthropic(record: Json) -> bool:
    blocks = [b for m in record["messages"] if isinstance(m.get("content"), list) for b in m["content"]]
    tools = record.get("tools")
    has_schemas = isinstance(tools, list) and any("input_schema" in tool for tool in tools)
    return "system" in record or has_schemas or any(block.get("type") in _ANTHROPIC_BLOCKS for block in blocks)


def _from_anthropic(record: Json) -> Json:
    for message in record["messages"]:
        content = message.get("content")
        if message.get("role") not in ("user", "assistant"):
            raise ValueError(f"a message has the role {message.get('role')!r}; Anthropic's are user and assistant")
        for block in content if isinstance(content, list) else ():
            if block.get("type") not in ("text", *_ANTHROPIC_BLOCKS):
                raise ValueError(f"a content block of the type {block.get('type')!r} cannot be trained; take it out")
    tools = [chat_tool(t.get("name"), t.get("description"), t.get("input_schema")) for t in record.get("tools") or ()]
    return {"messages": list(anthropic_messages(record)), "tools": tools}


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
    text = arguments if isinstance(arguments, str) else dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def chat_tool(name: Any, description: Any, parameters: Any) -> Json:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def text_of_parts(content: Any) -> Any:
    """The text of content parts; content with other parts stays as it was sent."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content  # type: ignore[arg-type]


# OpenAI


def _without_function_call(message: Json) -> Json:
    """OpenAI's form before `tool_calls`: one `function_call`, answered by the role `function`."""
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if message.get("function_call"):
        return {**message, "tool_calls": [{"type": "function", "function": message["function_call"]}]}
    return message


def _prompt_and_completion(prompt: Any, completion: Any) -> list[Json]:
    """TRL's form: texts or messages. What the assistant says in the prompt is not trained."""
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return [*({**message, "weight": 0} if message.get("role") == "assistant" else message for message in asked), *said]


def _tools(tools: Any) -> list[Json]:
    """Schemas in the form of chat templates; datasets often have them as JSON text."""
    if isinstance(tools, str):
        tools = read_json(tools) if tools.strip() else []
    if not isinstance(tools or [], list):
        raise ValueError('"tools" is not a list of schemas')
    found = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
    for tool in found:
        if not isinstance(tool["function"].get("name"), str):
            raise ValueError(f"a tool has no name: {tool!r:.100}; only function tools are supported")
    return found


# ShareGPT


def _from_sharegpt(record: Json) -> Json:
    messages: list[Json] = []
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
            for value in _HERMES_RESULT.findall(turn["value"]) or [turn["value"]]:
                messages += _results(messages, value)
        elif role == "assistant" and (calls := _HERMES_CALL.findall(turn["value"])):
            text = _HERMES_CALL.sub("", turn["value"]).strip()
            messages.append({"role": role, "content": text, "weight": turn.get("weight")})
            for call in calls:
                _add_calls(messages, {"value": call})
        else:
            messages.append({"role": role, "content": turn["value"], "weight": turn.get("weight")})
    return {"messages": messages, "tools": _tools(record.get("tools"))}


def _add_calls(messages: list[Json], turn: Json) -> None:
    """Calls as JSON text, one or a list, belong to the assistant's text before them."""
    try:
        value = read_json(turn["value"])
    except ValueError as error:
        try:
            value = literal_eval(turn["value"])  # some datasets have Python's dicts
        except (ValueError, SyntaxError):
            raise ValueError(f"a function call is not JSON ({error}): {turn['value']!r:.100}") from None
    calls = value if isinstance(value, list) else [value]
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": "", "weight": turn.get("weight")})
    own = messages[-1].setdefault("tool_calls", [])
    for call in calls:
        own.append(chat_call(f"call_{len(own)}", call["name"], call.get("arguments") or {}))


def _results(messages: Sequence[Json], value: str) -> list[Json]:
    """One result or, for parallel calls in one observation, a JSON list with one entry for each."""
    answered = 0
    for message in reversed(messages):
        if message["role"] != "tool":
            break
        answered += 1
    before = messages[-1 - answered] if len(messages) > answered else {}
    calls = (before.get("tool_calls") or [])[answered:]
    if len(calls) > 1 and value.lstrip().startswith("["):
        try:
            values = read_json(value)
        except ValueError:
            values = []
        if len(values) == len(calls):
            texts = [each if isinstance(each, str) else dumps(each, ensure_ascii=False) for each in values]
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
    return {"messages": messages, "tools": _tools(tools)}


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
