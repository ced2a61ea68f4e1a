"""Prompts by a chat template, and templates for families that have none or show no tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from palestra.core.errors import UnsupportedError
from palestra.core.types import Message
from palestra.models.chat.callformats import FORMATS, format_of
from palestra.models.chat.encode import PROBE, ForgedTexts, Piece, TemplateRefusal, render, with_texts

_CHARACTERS = r"[\w .,:;+*/=()%!?#@~^'-]+"
PLAIN = re.compile(rf"(?!\s){_CHARACTERS}(?<!\s)", re.ASCII)  # the same in every form of a body
_CAN_BE_PLAIN = re.compile(_CHARACTERS, re.ASCII)
MAX_OPENINGS = 8
_LAST = "PALESTRALAST"
_LOOK_FOR = "__contains__ __eq__ __ne__ startswith endswith find rfind index rindex count replace partition rpartition"
_LOOK_AT = (
    "__len__ __getitem__ __iter__ __lt__ __le__ __gt__ __ge__ split rsplit splitlines lower upper title capitalize "
    "casefold swapcase isalpha isalnum isdigit isdecimal isnumeric islower isupper istitle isspace isidentifier"
)


class ReadTrackingStr(str):
    """Stands for a plain text (`PLAIN`) while a template is rendered. `was_read`: what is written around it may depend
    on what it says. A search for what no plain text holds, a tag for instance, does not count."""

    was_read = False

    def __bool__(self) -> bool:
        return True  # as every plain text

    __hash__ = str.__hash__


def _watch(name: str, only_plain: bool) -> None:
    method = getattr(str, name)

    def watched(self: ReadTrackingStr, *arguments: Any) -> Any:
        if not only_plain or any(_CAN_BE_PLAIN.fullmatch(str(each)) for each in arguments):
            self.was_read = True
        return method(self, *arguments)

    setattr(ReadTrackingStr, name, watched)


for _name in _LOOK_FOR.split():
    _watch(_name, only_plain=True)
for _name in _LOOK_AT.split():
    _watch(_name, only_plain=False)


@dataclass(frozen=True)
class _Opening:
    """A prompt with a mark in the place of its last message's text."""

    before: Sequence[Message]
    name: str | None  # of the last message
    tools: Sequence[dict[str, Any]]
    pieces: list[Piece] | None  # None: what the template writes may depend on the last message's text


class Prompts:
    """Writes the openings of conversations, up to where the assistant begins to speak."""

    def __init__(self, render: Callable[..., str], has_special: Callable[[str], bool]) -> None:
        self._render = render
        self._has_special = has_special
        self._openings: list[_Opening] = []
        self._shows_tools = False  # not known yet

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> list[Piece]:
        """The prompt. What comes before a last message so plain that a template writes it as it is is remembered."""
        if variables or not messages or messages[-1].role != "user" or not PLAIN.fullmatch(messages[-1].text):
            return self._write(messages, tools, variables)
        *before, last = messages
        known = next((o for o in self._openings if (o.before, o.name, o.tools) == (before, last.name, [*tools])), None)
        if known is None:
            text = ReadTrackingStr(_LAST)
            pieces = self._write([*before, replace(last, text=text)], tools, {})
            once = sum(piece.text.count(_LAST) for piece in pieces) == 1
            known = _Opening(before, last.name, [*tools], pieces if once and not text.was_read else None)
            self._openings = [known, *self._openings[: MAX_OPENINGS - 1]]
        if known.pieces is None:
            return self._write(messages, tools, {})
        return [replace(p, text=p.text.replace(_LAST, last.text)) if _LAST in p.text else p for p in known.pieces]

    def _write(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], variables: Mapping[str, Any]
    ) -> list[Piece]:
        text = self._render(messages, tools, add_generation_prompt=True, **variables)
        if tools and not self._shows_tools:
            try:
                self._shows_tools = text != self._render(messages, (), add_generation_prompt=True, **variables)
            except TemplateRefusal:  # it needs tools
                self._shows_tools = True
            if not self._shows_tools:
                raise UnsupportedError(
                    "the chat template does not show tools to the model. Use a model whose template does "
                    "(Qwen2.5, Qwen3, Llama 3.1, …), or set tokenizer.chat_template."
                )
        forged = ForgedTexts(self._has_special)
        blank = [with_texts(message, forged.marked) for message in messages]
        if not forged.texts:
            return [Piece(text, False)]
        return forged.cut(text, self._render(blank, tools, add_generation_prompt=True, **variables))


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
