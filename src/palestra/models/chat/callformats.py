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


def _tagged(name: str, opening: str, closing: str) -> CallFormat:
    """A JSON list of calls between two tags."""
    find = partial(js.find_tagged, opening=opening, closing=closing)
    write = partial(js.write_tagged_list, opening=opening, closing=closing)
    return CallFormat(name, (opening,), find, write, (opening,))


def _between(module_find: Any, module_write: Any, *tags: str) -> dict[str, Any]:
    names = ("opening", "closing", "quote")
    keywords = dict(zip(names, tags, strict=False))
    return {"find": partial(module_find, **keywords), "write": partial(module_write, **keywords)}


_GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
_SEED = ("<seed:tool_call>", "</seed:tool_call>")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
_DSML = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_DSML4 = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

HERMES = CallFormat("hermes", (js.TOOL_CALL,), js.find_hermes, js.write_hermes, (js.TOOL_CALL,))
JSON = CallFormat("json", ("```",), js.find_fenced, js.write_fenced, (), ("{", "["))
LLAMA = CallFormat(
    "llama", ("<|python_tag|>", "<|python_start|>"), js.find_bare, js.write_bare, ("<|python_tag|>",), ("{", "[")
)
MISTRAL = CallFormat("mistral", (js.MISTRAL,), js.find_mistral, js.write_mistral, (js.MISTRAL,))
MISTRAL_ARGS = CallFormat("mistral_args", (js.MISTRAL,), js.find_mistral, js.write_mistral_args, (js.MISTRAL, "[ARGS]"))
QWEN_XML = CallFormat(
    "qwen_xml",
    (js.TOOL_CALL,),
    **_between(xml.find_qwen, xml.write_qwen, js.TOOL_CALL, js.TOOL_CALL_END),
    marks=(js.TOOL_CALL, "<function="),
)
GLM = CallFormat("glm", (js.TOOL_CALL,), xml.find_glm, xml.write_glm, (js.TOOL_CALL, "<arg_key>"))
HARMONY = CallFormat(
    "harmony", ("to=functions.",), tokens.find_harmony, tokens.write_harmony, ("<|channel|>", "<|message|>")
)
LFM = CallFormat("lfm", (tokens.LFM_OPEN,), tokens.find_lfm, tokens.write_lfm, (tokens.LFM_OPEN,))

# A template's format is the first one whose marks it contains, so the more specific ones come first.
FORMATS: tuple[CallFormat, ...] = (
    HARMONY,
    CallFormat("gemma4", _GEMMA4[:1], **_between(tokens.find_gemma, tokens.write_gemma, *_GEMMA4), marks=_GEMMA4[:1]),
    CallFormat(
        "function_gemma",
        _FUNCTION_GEMMA[:1],
        **_between(tokens.find_gemma, tokens.write_gemma, *_FUNCTION_GEMMA),
        marks=_FUNCTION_GEMMA[:1],
    ),
    LFM,
    CallFormat(
        "deepseek_v3",
        _DEEPSEEK,
        js.find_deepseek,
        partial(js.write_deepseek, is_v3=True),
        (_DEEPSEEK[0], "```json"),
    ),
    CallFormat("deepseek_v31", _DEEPSEEK, js.find_deepseek, partial(js.write_deepseek, is_v3=False), _DEEPSEEK[:1]),
    CallFormat(
        "deepseek_v4",
        _DSML4[:1],
        partial(xml.find_invoke, opening=_DSML4[0], closing=_DSML4[1]),
        partial(xml.write_invoke, opening=_DSML4[0], closing=_DSML4[1], prefix="｜DSML｜", marks_text=True),
        ("｜DSML｜", "tool_calls>"),
    ),
    CallFormat(
        "deepseek_v32",
        _DSML[:1],
        partial(xml.find_invoke, opening=_DSML[0], closing=_DSML[1]),
        partial(xml.write_invoke, opening=_DSML[0], closing=_DSML[1], prefix="｜DSML｜", marks_text=True),
        ("｜DSML｜",),
    ),
    CallFormat(
        "kimi", ("<|tool_calls_section_begin|>",), js.find_kimi, js.write_kimi, ("<|tool_calls_section_begin|>",)
    ),
    CallFormat("minimax", _MINIMAX[:1], **_between(xml.find_invoke, xml.write_invoke, *_MINIMAX), marks=_MINIMAX[:1]),
    CallFormat(
        "seed",
        _SEED[:1],
        partial(xml.find_qwen, opening=_SEED[0], closing=_SEED[1]),
        partial(xml.write_qwen, opening=_SEED[0], closing=_SEED[1], line=""),
        _SEED[:1],
    ),
    QWEN_XML,
    GLM,
    MISTRAL_ARGS,
    MISTRAL,
    HERMES,
    CallFormat(
        "granite",
        ("<|tool_call|>",),
        partial(js.find_tagged, opening="<|tool_call|>", closing="<|/tool_call|>", needs_close=False),
        partial(js.write_tagged_list, opening="<|tool_call|>", closing=""),
        ("<|tool_call|>",),
    ),
    CallFormat(
        "phi4",
        ("functools[",),
        js.find_phi,
        partial(js.write_tagged_list, opening="functools", closing=""),
        ("functools",),
        ("{", "["),
    ),
    _tagged("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>"),
    _tagged("tool_calls", "<tool_calls>", "</tool_calls>"),
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
