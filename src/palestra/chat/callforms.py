"""How families of models write tool calls, and how each is found in an assistant's text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from palestra.chat.pycalls import Unreadable, looks_like_calls, read_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_LOOKS_LIKE_JSON_CALL = re.compile(r'[\[\s]*\{\s*"(name|function|type|parameters|arguments)"')
_FENCE = re.compile(r"```(\w*)[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CALL_FENCES = ("tool_code", "tool_call", "tool_calls")
_ARGS = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
_JSON_SPACE = " \t\n\r"
_BEHIND_SPACE = re.compile(r"\S|\Z")
_DECODER = json.JSONDecoder()
_UNCLOSED = Unreadable(f"a tool call was opened with {OPEN} but not closed with {CLOSE}")

# What was found: the text beside the calls, and for each call its JSON value or why it could not be read.
Found = tuple[str, list[Any]]


@dataclass(frozen=True, slots=True)
class CallForm:
    """One syntax for calls: an example to show, the texts that may begin a call, and how to find calls."""

    name: str
    example: str
    opens: tuple[str, ...]
    find: Callable[[str], Found]


def form_of(chat_template: Any) -> CallForm:
    """The form that a chat template asks for; JSON in any dress where it does not say."""
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    if said := re.search(r'set call_form = "(\w+)"', text):
        return HERMES if said[1] == "hermes" else JSON
    if OPEN in text:
        return HERMES
    if _MISTRAL in text:
        return MISTRAL
    return LLAMA3 if "<|python_tag|>" in text or "<|start_header_id|>" in text else JSON


def _find_hermes(text: str) -> Found:
    parts, calls, position = list[str](), list[Any](), 0
    while (start := text.find(OPEN, position)) >= 0:
        parts.append(text[position:start])
        call, position = _next_block(text, start + len(OPEN))
        calls.append(call)
    return "".join([*parts, text[position:]]), calls


def _next_block(text: str, start: int) -> tuple[Any, int]:
    """The value of the block that begins at `start`, or why it has none, and where the text goes on."""
    begin: int = _BEHIND_SPACE.search(text, start).start()  # type: ignore[union-attr]
    try:  # tags inside of a JSON string are part of the argument
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        value, end = None, start
    close, reopened = text.find(CLOSE, end), text.find(OPEN, end)
    if close >= 0 and (reopened < 0 or close < reopened):
        is_read = end > begin and not (text[start:begin] + text[end:close]).strip(_JSON_SPACE)
        return value if is_read else _json(text[start:close]), close + len(CLOSE)
    return _UNCLOSED, reopened if reopened >= 0 else len(text)


def _find_llama3(text: str) -> Found:
    before, tag, behind = text.partition("<|python_tag|>")
    if tag:
        return before, _bare(behind, is_code=True) or [Unreadable("what follows <|python_tag|> is no call")]
    calls = _bare(text)
    return ("", calls) if calls else (text, [])


def _find_mistral(text: str) -> Found:
    before, *pieces = text.split(_MISTRAL)
    calls: list[Any] = []
    for piece in pieces:
        if named := _ARGS.match(piece):  # name[ARGS]{…}
            arguments = _json(piece[named.end() :])
            is_bad = isinstance(arguments, Unreadable)
            calls.append(arguments if is_bad else {"name": named[1], "arguments": arguments})
        else:
            calls += _flat(_json(piece))
    return before, calls


def _find_json(text: str) -> Found:
    """Fenced blocks that hold calls; without any, a text that is nothing but calls."""
    calls: list[Any] = []

    def take(fence: re.Match[str]) -> str:
        is_code = fence[1] in _CALL_FENCES
        found = _bare(fence[2], is_code)
        if not found and is_code:
            found = [Unreadable(f"the block {fence[1]} holds no call")]
        calls.extend(found)
        return "" if found else fence[0]

    rest = _FENCE.sub(take, text)
    if not calls and (bare := _bare(text)):
        return "", bare
    return rest, calls


def _bare(text: str, is_code: bool = False) -> list[Any]:
    """The calls that a text consists of, as JSON or as Python; nothing where it is something else."""
    body = text.strip()
    if looks_like_calls(body, is_code):
        return read_calls(body)
    if not _LOOKS_LIKE_JSON_CALL.match(body):
        return []
    calls: list[Any] = []
    while body:
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError) as error:
            return [*calls, Unreadable(_why(error))]
        calls += _flat(value)
        body = body[end:].lstrip("; \n\t")
    return calls if any(isinstance(call, Unreadable) or _is_call(call) for call in calls) else []


def _is_call(value: Any) -> bool:
    """JSON may also be an answer: a call has a name and arguments."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(inner, dict) and "name" in inner and bool({"arguments", "parameters"} & set(inner))


def _flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(_why(error))


def _why(error: Exception) -> str:
    return f"the tool call is not valid JSON ({reason(error)})"


def reason(error: Exception) -> str:
    """Why a text is not JSON, for the model to read."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"


HERMES = CallForm("hermes", f'{OPEN}{{"name": "tool_name", "arguments": {{…}}}}{CLOSE}', (OPEN,), _find_hermes)
LLAMA3 = CallForm("llama3", '{"name": "tool_name", "parameters": {…}}', ("<|python_tag|>", "{", "["), _find_llama3)
MISTRAL = CallForm("mistral", f'{_MISTRAL} [{{"name": "tool_name", "arguments": {{…}}}}]', (_MISTRAL,), _find_mistral)
JSON = CallForm("json", '```json\n{"name": "tool_name", "parameters": {…}}\n```', ("```", "{", "["), _find_json)
