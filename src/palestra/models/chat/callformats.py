"""The call formats of all model families, and which of them a chat template uses."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from palestra.models.chat import calls_json as js
from palestra.models.chat import calls_tokens as tokens
from palestra.models.chat import calls_xml as xml
from palestra.models.chat.calls_json import Calls, Found, Schemas


@dataclass(frozen=True)
class CallFormat:
    """One way to write tool calls.

    `opens` are the texts that begin a call anywhere in a message, `at_start` those that do so at its beginning only.
    A chat template uses this format if it contains all texts of `marks`.
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


def _between(
    name: str, tags: tuple[str, ...], find: Any, write: Any, marks: tuple[str, ...] = (), **writing: Any
) -> CallFormat:
    """A format with its calls between two tags; a third one quotes texts."""
    given = dict(zip(("opening", "closing", "quote"), tags, strict=False))
    return CallFormat(name, tags[:1], partial(find, **given), partial(write, **given, **writing), marks or tags[:1])


_TOOL_CALL = (js.TOOL_CALL, js.TOOL_CALL_END)
_DSML = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_DSML4 = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
_GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
_KIMI = ("<|tool_calls_section_begin|>",)
_GRANITE = ("<|tool_call|>",)
_PYTHON = ("<|python_tag|>", "<|python_start|>")
_BARE = ("{", "[")

HERMES = _between("hermes", _TOOL_CALL, js.find_tagged, js.write_tagged)
JSON = CallFormat("json", ("```",), js.find_fenced, js.write_fenced, (), _BARE)
LLAMA = CallFormat("llama", _PYTHON, js.find_bare, js.write_bare, _PYTHON[:1], _BARE)
MISTRAL = CallFormat("mistral", (js.MISTRAL,), js.find_mistral, js.write_mistral, (js.MISTRAL,))
HARMONY = CallFormat(
    "harmony", ("to=functions.",), tokens.find_harmony, tokens.write_harmony, ("<|channel|>", "<|message|>")
)
LFM = CallFormat("lfm", (tokens.LFM_OPEN,), tokens.find_lfm, tokens.write_lfm, (tokens.LFM_OPEN,))

# A template's format is the first one whose marks it contains, so the more specific ones come first.
FORMATS: tuple[CallFormat, ...] = (
    HARMONY,
    _between("gemma4", _GEMMA4, tokens.find_gemma, tokens.write_gemma),
    _between("function_gemma", _FUNCTION_GEMMA, tokens.find_gemma, tokens.write_gemma),
    LFM,
    CallFormat(
        "deepseek_v3", _DEEPSEEK, js.find_deepseek, partial(js.write_deepseek, is_v3=True), (_DEEPSEEK[0], "```json")
    ),
    CallFormat("deepseek_v31", _DEEPSEEK, js.find_deepseek, partial(js.write_deepseek, is_v3=False), _DEEPSEEK[:1]),
    _between("deepseek_v4", _DSML4, xml.find_invoke, xml.write_invoke, ("｜DSML｜", "tool_calls>"), prefix="｜DSML｜"),
    _between("deepseek_v32", _DSML, xml.find_invoke, xml.write_invoke, ("｜DSML｜",), prefix="｜DSML｜"),
    CallFormat("kimi", _KIMI, js.find_kimi, js.write_kimi, _KIMI),
    _between("minimax", ("<minimax:tool_call>", "</minimax:tool_call>"), xml.find_invoke, xml.write_invoke),
    _between("seed", ("<seed:tool_call>", "</seed:tool_call>"), xml.find_qwen, xml.write_qwen, line=""),
    _between("qwen_xml", _TOOL_CALL, xml.find_qwen, xml.write_qwen, (js.TOOL_CALL, "<function=")),
    CallFormat("glm", (js.TOOL_CALL,), xml.find_glm, xml.write_glm, (js.TOOL_CALL, "<arg_key>")),
    CallFormat("mistral_args", (js.MISTRAL,), js.find_mistral, js.write_mistral_args, (js.MISTRAL, "[ARGS]")),
    MISTRAL,
    HERMES,
    CallFormat(
        "granite",
        _GRANITE,
        partial(js.find_tagged, opening=_GRANITE[0], closing="<|/tool_call|>", needs_close=False),
        partial(js.write_tagged_list, opening=_GRANITE[0], closing=""),
        _GRANITE,
    ),
    CallFormat("phi4", ("functools[",), js.find_phi, js.write_phi, ("functools",), _BARE),
    _between("nemotron_v2", ("<TOOLCALL>", "</TOOLCALL>"), js.find_tagged, js.write_tagged_list),
    _between("tool_calls", ("<tool_calls>", "</tool_calls>"), js.find_tagged, js.write_tagged_list),
    LLAMA,
    JSON,
)
# Texts that identify the format of a template that shows no call.
_HINTS = {"<|tool_list_start|>": LFM, "<|start_header_id|>": LLAMA, "<|header_start|>": LLAMA}


def format_of(chat_template: Any, tokens: Collection[str] = ()) -> CallFormat:
    """The format that a chat template asks for or, where it does not say, that the tokenizer has tokens for.

    Without either it is JSON in a fenced block.
    """
    text = chat_template if isinstance(chat_template, str) else str(chat_template or "")
    if said := re.search(r'set call_form = "(\w+)"', text):  # Palestra's own prefix for templates without tools
        return next((each for each in FORMATS if each.name == said[1]), JSON)
    for each in FORMATS:
        if each.marks and all(mark in text for mark in each.marks):
            return each
    if hinted := next((each for hint, each in _HINTS.items() if hint in text), None):
        return hinted
    return next((each for each in FORMATS if each.marks and all(mark in tokens for mark in each.marks)), JSON)
