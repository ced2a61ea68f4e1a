"""An assistant's text -> reasoning, text and tool calls, in the model's own call format or an unexpected one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palestra.core.text import is_shallow
from palestra.core.types import ToolCall
from palestra.models.chat.callformats import FORMATS, HERMES, JSON, CallFormat
from palestra.models.chat.calls_json import Schemas, Unreadable, find_embedded, find_fenced, name_of, why_not_json

log = logging.getLogger("palestra")
UnexpectedCalls = Literal["execute", "error"]
# Formats in which the model gives each call an id that its result must repeat, with the pattern of a valid id.
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
MAY_HOLD_CALL = re.compile(r"[<\[{`]|to=functions\.")  # a call in any format has one of these
_KEEPS_ID = {"mistral": _MISTRAL_ID, "mistral_args": _MISTRAL_ID, "kimi": re.compile(r"\S+")}


@dataclass(frozen=True, slots=True)
class Reply:
    """The parts of an assistant's message."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...] = ()


def parse_assistant(
    text: str,
    format: CallFormat = HERMES,
    tools: Iterable[Mapping[str, Any]] = (),
    *,
    reasoning_is_open: bool = False,
    unexpected: UnexpectedCalls = "execute",
) -> Reply:
    """Read an assistant's message. A call that cannot be read is a ToolCall with `.error`.

    `tools` are the tools' schemas. Calls that name one of them are also found in another format than the model's own:
    they have `.format` set and, with `unexpected="error"`, an error that shows the expected format.

    >>> parse_assistant('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    Reply(reasoning='', text='Let me see.', calls=(ToolCall(id='call_0', name='add', arguments={'a': 1}, error=None),))
    """
    reasoning, spoken = split_reasoning(text, reasoning_is_open, format.opens[0])
    schemas = argument_schemas(tools)
    outside, found = format.find(spoken, schemas)
    calls = tuple(_call_of(value, index, format) for index, value in enumerate(found))
    if schemas and all(call.error is not None for call in calls) and MAY_HOLD_CALL.search(spoken):
        other = _find_unexpected(spoken, format, schemas, unexpected)
        if other is not None:
            outside, calls = other
    return Reply(reasoning, outside.strip(), calls)


def parse_by_template(tokenizer: Any, text: str, tools: Iterable[Mapping[str, Any]], prompt_end: str) -> Reply:
    """Read an assistant's message by the response template that came with the tokenizer."""
    try:
        message = tokenizer.parse_response(text, prefix=prompt_end, tools=[dict(tool) for tool in tools] or None)
    except Exception as error:  # it comes with the model, so it may fail in any way
        log.warning("the tokenizer's response template cannot read an answer (%s: %s)", type(error).__name__, error)
        message = {"content": text}
    calls = tuple(_call_of(value, index, JSON) for index, value in enumerate(message.get("tool_calls") or ()))
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return Reply(str(reasoning).strip(), str(message.get("content") or "").strip(), calls)


def argument_schemas(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """The JSON schema of each tool's arguments, by the tool's name."""
    functions = (tool.get("function", tool) for tool in tools)
    return {str(f.get("name")): f.get("parameters") or {} for f in functions if isinstance(f, Mapping)}


def unexpected_opens(own: CallFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts that may begin a call in any format: anywhere, and at the beginning of a message."""
    opens = dict.fromkeys([*own.opens, *(o for each in FORMATS for o in each.opens if each is not JSON)])
    fences = ("```json", "```tool", "```\n") if own is not JSON else ("```",)
    return (*opens, *fences), ("{", "[")


def _find_unexpected(
    text: str, own: CallFormat, schemas: Schemas, mode: UnexpectedCalls
) -> tuple[str, tuple[ToolCall, ...]] | None:
    """The text and the calls in the first other format in which every call names a tool."""
    for each in FORMATS:
        if each is own or each is JSON or not any(opening in text for opening in each.opens):
            continue
        outside, found = each.find(text, schemas)
        if found and all(name_of(call) in schemas for call in found):
            return outside, _unexpected_calls(found, each, own, mode)
    outside, found = ("", []) if own is JSON else find_fenced(text, schemas, known_tools_only=True)
    if not found:
        outside, found = find_embedded(text, schemas)
    return (outside, _unexpected_calls(found, JSON, own, mode)) if found else None


def _unexpected_calls(
    found: Sequence[Any], format: CallFormat, own: CallFormat, mode: UnexpectedCalls
) -> tuple[ToolCall, ...]:
    calls = []
    for index, value in enumerate(found):
        call = _call_of(value, index, format, own)
        error = call.error
        if error is None and mode == "error":
            expected = own.write([(call.name, call.arguments)])
            error = f"the call was not executed, because its format is wrong. Write it like this:\n{expected}"
        calls.append(ToolCall(call.id, call.name, call.arguments, error, format.name))
    return tuple(calls)


def _call_of(value: Any, index: int, format: CallFormat, expected: CallFormat | None = None) -> ToolCall:
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


def ends_open(prompt: str) -> bool:
    """Whether a prompt's end has opened the reasoning.

    >>> ends_open("<|im_start|>assistant\\n<think>\\n"), ends_open("<think>\\n\\n</think>\\n\\n")
    (True, False)
    """
    return bool(closing_tag(prompt))


def closing_tag(prompt: str) -> str:
    """The tag that ends the reasoning which a prompt's end has opened; empty if it has not."""
    end = prompt.rstrip()
    return next((closing for opening, closing in TAGS if end.endswith(opening)), "")


def has_closed(prompt: str) -> bool:
    """Whether a prompt ends behind reasoning, which is empty then.

    >>> has_closed("<think>\\n\\n</think>\\n\\n")
    True
    """
    return prompt.rstrip().endswith(tuple(closing for _, closing in TAGS))
