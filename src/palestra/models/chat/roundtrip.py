"""The startup check of a model's tool calls: what its chat template writes must be read back as the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from palestra.core.errors import PalestraError, UnsupportedError
from palestra.core.types import Message, ToolCall
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.written import common_start

_TOOL = "palestra_lookup"
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {
        "text": 'a "b", {c} <d> é\u65e5',
        "count": 3,
        "share": -0.5,
        "flag": True,
        "nested": {"list": [1, "two", False], "x": {}},
    },
    {"text": "42", "count": 0},
)
_TYPES = {"text": "string", "count": "integer", "share": "number", "flag": "boolean", "nested": "object"}
_PROPERTIES = {name: {"type": kind, "description": "A value."} for name, kind in _TYPES.items()}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}
_SCHEMA = {
    "type": "function",
    "function": {"name": _TOOL, "description": "Look something up.", "parameters": _PARAMETERS},
}
_QUESTION, _RESULT = "PALESTRAQUESTION", "PALESTRARESULT"
# tokenizer -> its template, and why the check failed
_checked: WeakKeyDictionary[Any, dict[tuple[str, bool], str | None]] = WeakKeyDictionary()


def tool_call_problem(chat: ChatFormat, *, appends: bool = True) -> str | None:
    """Why tool calls cannot be used: they do not come back from the model's own template as they were or, with
    `appends`, results cannot be appended. None if they can. Computed once per tokenizer and template."""
    known = _checked.setdefault(chat.tokenizer, {})
    key = (str(chat.tokenizer.chat_template), appends)
    if key not in known:
        known[key] = _reason(chat, appends)
    return known[key]


def takes_parallel_calls(chat: ChatFormat) -> bool:
    """Whether the template writes several calls of one message, so that they are read back."""
    try:
        return _read_back(chat, _ARGUMENTS) == list(_ARGUMENTS)
    except PalestraError:
        return False


def check_tool_calls(chat: ChatFormat, *, appends: bool = True) -> None:
    """Raise PalestraError if there is a `tool_call_problem`."""
    if reason := tool_call_problem(chat, appends=appends):
        raise UnsupportedError(
            f"tool calls of this model cannot be used: {reason}. Its chat template was taken to write the call format "
            f"{chat.call_format.name!r}, like this:\n{chat.call_format.example}\n"
            "Use a model whose template is supported (docs/models.md lists them), or set tokenizer.chat_template to "
            "one that writes calls in a supported format, and save the tokenizer."
        )


def _reason(chat: ChatFormat, appends: bool) -> str | None:
    try:
        chat.prompt([Message("user", _QUESTION)], [_SCHEMA])
        if appends:
            chat.continuation([Message("tool", _RESULT, tool_call_id="call_0", name=_TOOL)])
        if _read_back(chat, _ARGUMENTS) == list(_ARGUMENTS):
            return None
        # some templates refuse several calls in one message, or leave out all but the first
        for arguments in _ARGUMENTS:
            found = _read_back(chat, [arguments])
            if found != [arguments]:
                return f"of a call with the arguments {arguments} the template writes text that is read as {found}"
    except PalestraError as error:
        return str(error).rstrip(".")
    return None


def _read_back(chat: ChatFormat, arguments: Sequence[dict[str, Any]]) -> list[Any]:
    """The arguments, or the error, of each call in what the template writes for these calls."""
    written, prompt = written_calls(chat, arguments)
    calls = chat.parse(written, [_SCHEMA], prompt).calls
    return [call.error or (f"a call in the format {call.format}" if call.format else call.arguments) for call in calls]


def written_calls(chat: ChatFormat, arguments: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The assistant's message with calls of these arguments as the template writes it, and the prompt before it."""
    calls = tuple(ToolCall(f"call_{i}", _TOOL, each) for i, each in enumerate(arguments))
    question, answer = Message("user", _QUESTION), Message("assistant", "", calls)
    results = [Message("tool", f"{_RESULT}{i}", tool_call_id=call.id, name=_TOOL) for i, call in enumerate(calls)]
    prompt = chat.render([question], [_SCHEMA], add_generation_prompt=True)
    try:
        whole = chat.render([question, answer, *results], [_SCHEMA])
    except PalestraError:
        if len(calls) > 1:
            return "", prompt
        raise
    start = common_start(prompt, whole)
    written = whole[start:].partition(_RESULT)[0]
    ends = [end for stop in chat.stop_texts if (end := written.find(stop)) >= 0]
    return written[: min(ends, default=len(written))], whole[:start]
