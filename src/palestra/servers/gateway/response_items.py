"""Items of OpenAI's Responses: input items -> messages, an answer -> output items."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.messages import from_dict
from palestra.core.types import Message
from palestra.servers.gateway.request import Answer
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.openai_forms import chat_logprobs
from palestra.servers.openai.sampling_fields import short


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
            raise PalestraError(f"input.{i}: an item of type {short(kind)} is not supported; leave it out")
        speaks = kind == "function_call" or (kind == "message" and item.get("role") == "assistant")
    try:
        return [from_dict(message) for message in rows]
    except (TypeError, AttributeError) as error:
        raise PalestraError(f"input: not in the form of a conversation ({error})") from None


def output_items(answer: Answer, model: Completer, message_id: str, with_logprobs: bool) -> list[dict[str, Any]]:
    """Thinking, text and calls, in the order in which models write them."""
    items: list[dict[str, Any]] = []
    text, calls = answer.message.text, answer.message.tool_calls
    if answer.thinking:
        thought = [{"type": "reasoning_text", "text": answer.thinking}]
        items.append({"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": thought})
    status = "incomplete" if answer.is_cut_off else "completed"
    if text or not calls:
        logprobs = chat_logprobs(answer.completion, model)["content"] if with_logprobs else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        message = {"id": message_id, "type": "message", "role": "assistant", "status": status, "content": [part]}
        items.append(message)
    for call in calls:
        about = {"id": _new_id("fc"), "type": "function_call", "status": status, "call_id": call.id, "name": call.name}
        items.append({**about, "arguments": json.dumps(call.arguments, ensure_ascii=False)})
    return items


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
