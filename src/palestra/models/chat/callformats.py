"""The call formats of all model families, which of them a chat template uses, and the reading of a message by them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count, repeat
from typing import Any

from palestra.core.types import ToolCall
from palestra.models.chat import calls_json as js
from palestra.models.chat import calls_tagged as tags
from palestra.models.chat.toolcalls import (
    HERMES,
    MAY_HOLD_CALL,
    TOOL_CALL,
    CallFormat,
    Reply,
    Schemas,
    UnexpectedCalls,
    argument_schemas,
    call_of,
    find_tagged,
    name_of,
    split_reasoning,
)


def _between(
    name: str, texts: tuple[str, ...], find: Any, write: Any, marks: tuple[str, ...] = (), **writing: Any
) -> CallFormat:
    """A format with its calls between two texts; a third one quotes strings."""
    named = dict(zip(("opening", "closing", "quote"), texts, strict=False))
    return CallFormat(name, texts[:1], partial(find, **named), partial(write, **named, **writing), marks or texts[:1])


_DSML = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_DSML4 = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
_GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_KIMI = ("<|tool_calls_section_begin|>",)
_GRANITE = ("<|tool_call|>",)
_PYTHON = ("<|python_tag|>", "<|python_start|>")
_BARE = ("{", "[")

JSON = CallFormat("json", ("```",), js.find_fenced, js.write_fenced, (), _BARE)
LLAMA = CallFormat("llama", _PYTHON, js.find_bare, js.write_bare, _PYTHON[:1], _BARE)
MISTRAL = CallFormat("mistral", (js.MISTRAL,), js.find_mistral, js.write_mistral, (js.MISTRAL,))
HARMONY = CallFormat(
    "harmony", ("to=functions.",), tags.find_harmony, tags.write_harmony, ("<|channel|>", "<|message|>")
)
LFM = CallFormat("lfm", (tags.LFM_OPEN,), tags.find_lfm, tags.write_lfm, (tags.LFM_OPEN,))

# A template's format is the first one whose marks it contains, so the more specific ones come first.
FORMATS: tuple[CallFormat, ...] = (
    HARMONY,
    _between("gemma4", _GEMMA4, tags.find_gemma, tags.write_gemma),
    _between("function_gemma", _FUNCTION_GEMMA, tags.find_gemma, tags.write_gemma),
    LFM,
    CallFormat(
        "deepseek_v3", _DEEPSEEK, js.find_deepseek, partial(js.write_deepseek, is_v3=True), (_DEEPSEEK[0], "```json")
    ),
    CallFormat("deepseek_v31", _DEEPSEEK, js.find_deepseek, partial(js.write_deepseek, is_v3=False), _DEEPSEEK[:1]),
    _between(
        "deepseek_v4", _DSML4, tags.find_invoke, tags.write_invoke, ("｜DSML｜", "tool_calls>"), prefix="｜DSML｜"
    ),
    _between("deepseek_v32", _DSML, tags.find_invoke, tags.write_invoke, ("｜DSML｜",), prefix="｜DSML｜"),
    CallFormat("kimi", _KIMI, js.find_kimi, js.write_kimi, _KIMI),
    _between("minimax", ("<minimax:tool_call>", "</minimax:tool_call>"), tags.find_invoke, tags.write_invoke),
    _between("seed", ("<seed:tool_call>", "</seed:tool_call>"), tags.find_qwen, tags.write_qwen, line=""),
    _between("qwen_xml", TOOL_CALL, tags.find_qwen, tags.write_qwen, (TOOL_CALL[0], "<function=")),
    CallFormat("glm", TOOL_CALL[:1], tags.find_glm, tags.write_glm, (TOOL_CALL[0], "<arg_key>")),
    CallFormat("mistral_args", (js.MISTRAL,), js.find_mistral, js.write_mistral_args, (js.MISTRAL, "[ARGS]")),
    MISTRAL,
    HERMES,
    CallFormat(
        "granite",
        _GRANITE,
        partial(find_tagged, opening=_GRANITE[0], closing="<|/tool_call|>", needs_close=False),
        partial(js.write_tagged_list, opening=_GRANITE[0], closing=""),
        _GRANITE,
    ),
    CallFormat("phi4", ("functools[",), js.find_phi, js.write_phi, ("functools",), _BARE),
    _between("nemotron_v2", ("<TOOLCALL>", "</TOOLCALL>"), find_tagged, js.write_tagged_list),
    _between("tool_calls", ("<tool_calls>", "</tool_calls>"), find_tagged, js.write_tagged_list),
    LLAMA,
    JSON,
)
# Texts that identify the format of a template that shows no call.
_HINTS = {"<|tool_list_start|>": LFM, "<|start_header_id|>": LLAMA, "<|header_start|>": LLAMA}


def format_of(chat_template: Any, tokens: Collection[str] = ()) -> CallFormat:
    """The format that a chat template asks for, else one that the tokenizer has tokens for, else JSON in a block."""
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    if said := re.search(r'set call_form = "(\w+)"', text):  # Palestra's own prefix for templates without tools
        return next((each for each in FORMATS if each.name == said[1]), JSON)
    for each in FORMATS:
        if each.marks and all(mark in text for mark in each.marks):
            return each
    if hinted := next((each for hint, each in _HINTS.items() if hint in text), None):
        return hinted
    return next((each for each in FORMATS if each.marks and all(mark in tokens for mark in each.marks)), JSON)


def unexpected_opens(own: CallFormat) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts that may begin a call in any format: anywhere, and at the beginning of a message."""
    opens = dict.fromkeys([*own.opens, *(o for each in FORMATS for o in each.opens if each is not JSON)])
    fences = ("```json", "```tool", "```\n") if own is not JSON else ("```",)
    return (*opens, *fences), ("{", "[")


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
    outside, values = format.find(spoken, schemas)
    calls = tuple(map(call_of, values, count(), repeat(format)))
    if schemas and all(call.error is not None for call in calls) and MAY_HOLD_CALL.search(spoken):
        outside, calls = _find_unexpected(spoken, format, schemas, unexpected) or (outside, calls)
    return Reply(reasoning, outside.strip(), calls)


def _find_unexpected(
    text: str, own: CallFormat, schemas: Schemas, mode: UnexpectedCalls
) -> tuple[str, tuple[ToolCall, ...]] | None:
    """The text and the calls in the first other format in which every call names a tool."""
    for format in FORMATS:
        if format is own or format is JSON or not any(opening in text for opening in format.opens):
            continue
        outside, values = format.find(text, schemas)
        if values and all(name_of(value) in schemas for value in values):
            break
    else:
        format = JSON
        outside, values = ("", []) if own is JSON else js.find_fenced(text, schemas, known_tools_only=True)
        if not values:
            outside, values = js.find_embedded(text, schemas)
        if not values:
            return None
    calls = []
    for index, value in enumerate(values):
        call = call_of(value, index, format, own)
        error = call.error
        if error is None and mode == "error":
            expected = own.write([(call.name, call.arguments)])
            error = f"the call was not executed, because its format is wrong. Write it like this:\n{expected}"
        calls.append(replace(call, error=error, format=format.name))
    return outside, tuple(calls)
