"""The parts of an assistant's text: reasoning, text and tool calls. All call formats share what is here."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from palestra.core.text import is_shallow
from palestra.core.types import ToolCall

log = logging.getLogger("palestra")
UnexpectedCalls = Literal["execute", "error"]
Schemas = Mapping[str, Mapping[str, Any]]  # tool name -> JSON schema of its arguments
Found = tuple[str, list[Any]]  # the text outside of the calls, and the calls
Calls = Sequence[tuple[str, Mapping[str, Any]]]  # (name, arguments) of each call to write

TOOL_CALL = ("<tool_call>", "</tool_call>")
# Formats in which the model gives each call an id that its result must repeat, with the pattern of a valid id.
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
MAY_HOLD_CALL = re.compile(r"[<\[{`]|to=functions\.")  # a call in any format has one of these
_KEEPS_ID = {"mistral": _MISTRAL_ID, "mistral_args": _MISTRAL_ID, "kimi": re.compile(r"\S+")}
_NOT_SPACE = re.compile(r"\S|\Z")
decoder = json.JSONDecoder()


@dataclass(frozen=True)
class CallFormat:
    """One way to write tool calls.

    `opens` are the texts that begin a call anywhere in a message, `at_start` those that do so at its beginning only.
    A chat template uses this format if it contains all texts of `marks`.
    `find` returns the text outside of the calls and the calls. A call is a dict with "name" and "arguments" (or
    "parameters"), or `Unreadable`.
    """

    name: str
    opens: tuple[str, ...]
    find: Callable[[str, Schemas], Found]
    write: Callable[[Calls], str]
    marks: tuple[str, ...]
    at_start: tuple[str, ...] = ()

    @cached_property
    def example(self) -> str:
        return self.write([("tool_name", {"argument": "value"})])


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A call that cannot be read, why, and its name if that much is known."""

    reason: str
    name: str = ""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_json(text: str) -> Any:
    """The JSON value of a text, or `Unreadable`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return Unreadable(f"the tool call is not valid JSON ({why_not_json(error)})")


def why_not_json(error: Exception) -> str:
    """Why a text is not JSON, for the model to read."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number is too long"


def find_tagged(text: str, schemas: Schemas, opening: str, closing: str, *, needs_close: bool = True) -> Found:
    """JSON objects, or lists of them, between two tags. Tags inside of a JSON string belong to the argument."""
    parts, calls, position = list[str](), list[Any](), 0
    while (start := text.find(opening, position)) >= 0:
        parts.append(text[position:start])
        start += len(opening)
        values, end = decode_all(text, start)
        reopened = text.find(opening, end)
        limit = reopened if reopened >= 0 else len(text)
        if (close := text.find(closing, end, limit)) >= 0:
            is_read = bool(values) and not text[end:close].strip()
            calls += values if is_read else [read_json(text[start:close])]
            position = close + len(closing)
        elif needs_close:
            calls.append(Unreadable(f"a tool call was opened with {opening} but not closed with {closing}"))
            position = limit
        else:
            calls += values or [read_json(text[start:limit])]
            position = end if values else limit
    return "".join([*parts, text[position:]]), calls


def decode_all(text: str, start: int) -> tuple[list[Any], int]:
    """The JSON values that follow each other from `start` on, lists of calls flattened, and where they end."""
    values, end = list[Any](), start
    while True:
        begin: int = _NOT_SPACE.search(text, end).start()  # type: ignore[union-attr]
        if values and text[begin : begin + 1] in (",", ";"):
            begin = _NOT_SPACE.search(text, begin + 1).start()  # type: ignore[union-attr]
        if text[begin : begin + 1] == "<":  # a tag: the usual end, without the cost of an exception
            return values, end
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return values, end
        values += value if isinstance(value, list) else [value]


def write_tagged(calls: Calls, opening: str, closing: str) -> str:
    """One block for each call."""
    return "\n".join(f"{opening}\n{dumps({'name': n, 'arguments': dict(a)})}\n{closing}" for n, a in calls)


HERMES = CallFormat(
    "hermes",
    TOOL_CALL[:1],
    partial(find_tagged, opening=TOOL_CALL[0], closing=TOOL_CALL[1]),
    partial(write_tagged, opening=TOOL_CALL[0], closing=TOOL_CALL[1]),
    TOOL_CALL[:1],
)


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of an assistant's message."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...] = ()


def parse_by_template(
    tokenizer: Any, text: str, format: CallFormat, tools: Iterable[Mapping[str, Any]], prompt_end: str
) -> Reply:
    """Read an assistant's message by the response template that came with the tokenizer."""
    try:
        message = tokenizer.parse_response(text, prefix=prompt_end, tools=[dict(tool) for tool in tools] or None)
    except Exception as error:  # it comes with the model, so it may fail in any way
        log.warning("the tokenizer's response template cannot read an answer (%s: %s)", type(error).__name__, error)
        message = {"content": text}
    calls = tuple(call_of(value, index, format) for index, value in enumerate(message.get("tool_calls") or ()))
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return Reply(str(reasoning).strip(), str(message.get("content") or "").strip(), calls)


def argument_schemas(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """The JSON schema of each tool's arguments, by the tool's name."""
    schemas = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            schemas[str(function.get("name"))] = function.get("parameters") or {}
    return schemas


def call_of(value: Any, index: int, format: CallFormat, expected: CallFormat | None = None) -> ToolCall:
    call_id = f"call_{index}"

    def broken(why: str, name: str = "") -> ToolCall:
        return ToolCall(call_id, name, error=f"{why}. Write {(expected or format).example}")

    if isinstance(value, Unreadable):
        return broken(value.reason, value.name)
    if not isinstance(value, dict):
        return broken("the tool call is not a JSON object")
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    name = name_of(value)
    if not name:
        return broken('the tool call has no "name"')
    key = "arguments" if "arguments" in inner or (format is HERMES and "parameters" not in inner) else "parameters"
    arguments: Any = inner.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return broken(f'"{key}" is text that is not valid JSON ({why_not_json(error)})', name)
    if not isinstance(arguments, dict):
        return broken(f'"{key}" is not a JSON object', name)
    if not is_shallow(arguments):
        return broken(f'"{key}" is nested too deeply', name)
    own_id = value.get("id")
    keeps = _KEEPS_ID.get(format.name)
    if keeps is not None and isinstance(own_id, str) and keeps.fullmatch(own_id):
        call_id = own_id
    return ToolCall(call_id, name, arguments)


def name_of(call: Any) -> str:
    """The name of the tool that a found call names; empty if it names none."""
    if not isinstance(call, dict):
        return call.name if isinstance(call, Unreadable) else ""
    inner = call["function"] if isinstance(call.get("function"), dict) else call
    name = inner.get("name", inner.get("tool_name", inner.get("function")))
    return name if isinstance(name, str) else ""


# Opening and closing tag of each family. The tags are unambiguous, so the family does not have to be known.
TAGS = (
    ("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Kimi, Nemotron, MiniMax, SmolLM3, Granite, LFM2
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),  # Seed
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("◁think▷", "◁/think▷"),  # Kimi VL
)
_PAIRS = (rf"{re.escape(opening)}(.*?)(?:{re.escape(closing)}|\Z)" for opening, closing in TAGS)
_BLOCK = re.compile(rf"\s*(?:{'|'.join(_PAIRS)})", re.DOTALL)
_ANALYSIS = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>analysis(?:(?!<\|message\|>|<\|channel\|>|to=).)*<\|message\|>"
    r"(.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_MARKS = re.compile("|".join(re.escape(tag) for pair in TAGS for tag in pair) + r"|<\|channel\|>analysis")


def split_reasoning(text: str, is_open: bool = False, before: str | None = None) -> tuple[str, str]:
    """The reasoning without its tags, and the text that follows.

    `is_open`: the prompt ended with an opening tag. Where this is not known, a closing tag that was never opened ends
    the reasoning too, unless the text `before`, which begins a tool call, comes first.
    """
    if not is_open and _MARKS.search(text) is None:
        return "", text
    parts = [match[1].strip() for match in _ANALYSIS.finditer(text)]
    text = _ANALYSIS.sub("", text) if parts else text
    close, opening = text.find("</think>"), text.find("<think>")
    call = text.find(before) if before else -1
    closes_first = (opening < 0 or close < opening) and (call < 0 or close < call)
    if is_open or (close >= 0 and closes_first):
        places = [(text.find(tag), tag) for _, tag in TAGS if tag in text]
        reasoning, _, text = text.partition(min(places)[1]) if places else (text, "", "")
        parts.append(reasoning)
    position = 0
    while block := _BLOCK.match(text, position):
        parts.append(block[block.lastindex or 0])
        position = block.end()
    text = text[position:]
    if parts and text.lstrip().startswith("<response>"):  # Granite 3 wraps its answer when it thinks
        text = text.strip().removeprefix("<response>").removesuffix("</response>")
    return "\n".join(part.strip() for part in parts if part.strip()), text


def strip_reasoning(text: str) -> str:
    """The text without reasoning, wherever it is."""
    if _MARKS.search(text) is None:
        return text.strip()
    _, text = split_reasoning(text)
    for opening, closing in TAGS:
        if opening in text:
            text = re.sub(f"{re.escape(opening)}.*?(?:{re.escape(closing)}|\\Z)", "", text, flags=re.DOTALL)
    return text.strip()


def is_inside(text: str) -> bool:
    """Whether a text ends within reasoning that it opened at its start or, in harmony, in its last message."""
    start = text.lstrip()
    if any(start.startswith(opening) and closing not in start for opening, closing in TAGS):
        return True
    return text.rfind("<|channel|>analysis") > max(text.rfind("<|end|>"), -1)


def closing_tag(prompt: str) -> str:
    """The tag that ends the reasoning which a prompt's end has opened; empty if it has not.

    >>> closing_tag("<|im_start|>assistant\\n<think>\\n"), closing_tag("<think>\\n\\n</think>\\n\\n")
    ('</think>', '')
    """
    end = prompt.rstrip()
    for opening, closing in TAGS:
        if end.endswith(opening):
            return closing
    return ""
