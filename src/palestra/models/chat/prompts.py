"""Chat templates for model families that have none, or whose template shows no tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

from palestra.models.chat.callformats import FORMATS, format_of
from palestra.models.chat.encode import PROBE, TemplateRefusal, render

# family -> special tokens that only its tokenizers have
_MARKS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi3": ("<|assistant|>", "<|end|>"),
}
_NO_ARGUMENTS: tuple[Any, ...] = ({}, "{}")  # some templates want an object, some text
# SmolLM3 takes its tools by another name
_XML_TOOLS = "{%- set xml_tools = xml_tools or tools -%}\n"
# FunctionGemma shows its tools below a system message only
_SYSTEM_FOR_TOOLS = (
    '{%- if tools and messages[0].role != "system" -%}'
    '{%- set messages = [{"role": "system", "content": ""}] + messages -%}{%- endif -%}\n'
)


def prepare(tokenizer: Any) -> None:
    """Give the tokenizer a chat template that shows tools, if its family is known; its own stays where it can.

    What is set here is saved with the model, so other programs write exactly the same conversations.
    """
    family = family_of(tokenizer)
    if not tokenizer.chat_template and family is not None:
        tokenizer.chat_template = _read(family)
    template = tokenizer.chat_template
    if isinstance(template, str) and "xml_tools" in template and not template.startswith(_XML_TOOLS):
        tokenizer.chat_template = template = _XML_TOOLS + template
    shows_tools = isinstance(template, str) and _shows(tokenizer, {"role": "user", "content": "?"}, [PROBE])
    if isinstance(template, str) and not shows_tools and _shows(tokenizer, {"role": "system", "content": "?"}, [PROBE]):
        tokenizer.chat_template, shows_tools = _SYSTEM_FOR_TOOLS + template, True
    if isinstance(template, str) and not shows_tools:
        form = _own_format(tokenizer) or ("hermes" if family == "chatml" else "json")
        place = "system" if _shows(tokenizer, {"role": "system", "content": "palestra_probe"}) else "user"
        settings = f'{{%- set call_form = "{form}" -%}}{{%- set tools_in = "{place}" -%}}\n'
        if form not in ("hermes", "json"):  # the template itself writes the calls
            example = json.dumps(next(each for each in FORMATS if each.name == form).example, ensure_ascii=False)
            settings += f"{{%- set call_example = {example} -%}}\n"
        tokenizer.chat_template = settings + _read("tools") + template


def family_of(tokenizer: Any) -> str | None:
    """The family whose special tokens the tokenizer has."""
    known = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    return next((family for family, marks in _MARKS.items() if known.issuperset(marks)), None)


def _own_format(tokenizer: Any) -> str | None:
    """The format of a template that writes calls but does not show tools (DeepSeek's); None if it writes no calls."""
    for arguments in _NO_ARGUMENTS:
        call = {"id": "call00000", "type": "function", "function": {"name": "palestra_probe", "arguments": arguments}}
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        with suppress(TemplateRefusal):
            if "palestra_probe" in render(tokenizer, [question, answer]):
                return format_of(tokenizer.chat_template).name
    return None


def _read(name: str) -> str:
    file = resources.files("palestra.models.chat") / "templates" / f"{name}.jinja"
    return file.read_text("utf-8").rstrip("\n")


def _shows(tokenizer: Any, message: dict[str, str], tools: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether the probe's name, in a message or in a tool, comes out of the template."""
    messages = [message] if message["role"] == "user" else [message, {"role": "user", "content": "?"}]
    try:
        return "palestra_probe" in render(tokenizer, messages, tools)
    except TemplateRefusal:
        return False
