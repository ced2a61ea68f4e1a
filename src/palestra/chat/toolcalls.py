"""Tool calls out of an assistant's text, in the form that its family of models writes."""

from __future__ import annotations

import json
import re
from typing import Any

from palestra.chat.callforms import HERMES, MISTRAL, OPEN, CallForm, reason
from palestra.chat.pycalls import Unreadable
from palestra.core.types import ToolCall

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_LEFT_OPEN_BY_PROMPT = re.compile(r"\A(?:(?!<think>).)*?</think>", re.DOTALL)
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def parse_assistant(text: str, form: CallForm = HERMES) -> tuple[str, tuple[ToolCall, ...]]:
    """The text outside of the calls, and the calls. What cannot be read is a ToolCall with `.error`.

    >>> parse_assistant('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', (ToolCall(id='call_0', name='add', arguments={'a': 1}, error=None),))
    """
    thinking, rest = split_thinking(text)
    outside, found = HERMES.find(rest) if OPEN in rest else form.find(rest)
    calls = tuple(_call_of(value, index, form) for index, value in enumerate(found))
    return (thinking + outside).strip(), calls


def strip_thinking(text: str) -> str:
    """The text without `<think>…</think>`, also where the prompt had opened it or nothing closed it."""
    if "think>" not in text:
        return text.strip()
    return _THINKING.sub("", _LEFT_OPEN_BY_PROMPT.sub("", text, count=1)).strip()


def split_thinking(text: str) -> tuple[str, str]:
    """The thinking at the start, in which a call is text, not executed, and what follows."""
    end = text.find("</think>")
    opening = text.find(OPEN)
    if end >= 0 and (text.lstrip().startswith("<think>") or opening < 0 or end < opening):
        end += len("</think>")
        return text[:end], text[end:]
    return "", text


def _call_of(value: Any, index: int, form: CallForm) -> ToolCall:
    call_id = f"call_{index}"

    def broken(why: str, name: str = "") -> ToolCall:
        return ToolCall(call_id, name, error=f"{why}. Write {form.example}.")

    if isinstance(value, Unreadable):
        return broken(value.reason, value.name)
    if not isinstance(value, dict):
        return broken("the tool call is not a JSON object")
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = inner.get("name")
    if not isinstance(name, str) or not name:
        return broken('the tool call has no "name"')
    key = "arguments" if "arguments" in inner or form is HERMES else "parameters"
    arguments: Any = inner.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return broken(f'"{key}" is text that is not valid JSON ({reason(error)})', name)
    if not isinstance(arguments, dict):
        return broken(f'"{key}" is not a JSON object', name)
    own_id = value.get("id")
    if form is MISTRAL and isinstance(own_id, str) and _MISTRAL_ID.fullmatch(own_id):
        call_id = own_id  # the model's own, by which it will look for the result
    return ToolCall(call_id, name, arguments)
