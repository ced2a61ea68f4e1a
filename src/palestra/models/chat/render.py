"""Chat templates: rendering with a time limit, and templates for families that have none or show no tools.

A template comes with the model: it may fail in any way, and may never end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any, Literal

from palestra.core.calls import TimeLimitError, time_limit
from palestra.core.errors import UnsupportedError, UserCodeError
from palestra.core.messages import to_dict
from palestra.core.types import Message, ToolCall
from palestra.models.chat.callformats import FORMATS, CallFormat, format_of

_CHARACTERS = r"[\w .,:;+*/=()%!?#@~^'-]+"
PLAIN = re.compile(rf"(?!\s){_CHARACTERS}(?<!\s)", re.ASCII)  # the same in every form of a body
_CAN_BE_PLAIN = re.compile(_CHARACTERS, re.ASCII)
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


_CallsAs = Literal["object", "text", "content"]
_TRIED: tuple[_CallsAs, ...] = ("object", "text")
_QUESTION = "PALESTRAQUESTION"
# A tool to examine templates with.
PROBE = {
    "type": "function",
    "function": {"name": "palestra_probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
RENDER_S = 10.0  # a real template takes milliseconds


class TemplateRefusal(UnsupportedError):
    """The template takes no such messages."""


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """The conversation as text; `variables` are the template's own."""
    try:
        with time_limit(RENDER_S):
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
    except TimeLimitError:
        raise UserCodeError(
            f"the chat template took longer than {RENDER_S:g} s for {len(messages)} messages; "
            "set tokenizer.chat_template to one that ends"
        ) from None
    except Exception as error:  # jinja2's own, and whatever an expression in a template raises
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise TemplateRefusal(f"the chat template refuses messages with the roles {roles}: {error}") from None
    return text


@dataclass(frozen=True)
class TemplateRenderer:
    """Renders conversations with calls as the tokenizer's template takes them."""

    tokenizer: Any
    format: CallFormat

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = False,
        *,
        last_reasoning: str = "",
        **variables: Any,
    ) -> str:
        """The conversation as the template writes it; `last_reasoning` is that of the last assistant message."""
        has_calls = any(message.tool_calls or message.tool_call_id for message in messages)
        plain = self._plain(messages, self._calls_as) if has_calls else [to_dict(message) for message in messages]
        if last_reasoning:  # templates have one of two names for it
            last = next(row for row in reversed(plain) if row["role"] == "assistant")
            last |= {"reasoning_content": last_reasoning, "thinking": last_reasoning}
        return render(self.tokenizer, plain, tools, add_generation_prompt, **variables)

    @cached_property
    def _calls_as(self) -> _CallsAs:
        """The form in which the template accepts calls. If it omits calls: as text, in the model's format."""
        call = ToolCall("call_0", "palestra_probe", {"a": 1})
        dialogue = [Message("user", _QUESTION), Message("assistant", "", (call,)), Message("tool", "4", (), "call_0")]
        is_shown = False
        for calls_as in _TRIED:
            try:
                text = render(self.tokenizer, self._plain(dialogue, calls_as), (PROBE,))
            except TemplateRefusal:
                continue
            written = text.partition(_QUESTION)[2]
            is_shown = is_shown or call.name in written
            # a dict written by Python's str, or text written as a JSON string, is no object
            if call.name in written and "{'a'" not in written and '\\"a' not in written:
                return calls_as
        return "object" if is_shown else "content"

    def _plain(self, messages: Sequence[Message], calls_as: _CallsAs) -> list[dict[str, Any]]:
        if calls_as == "content":
            messages = [_with_written_calls(message, self.format) for message in messages]
        if self.format.name in ("mistral", "mistral_args"):
            messages = [_with_short_ids(message) for message in messages]
        return [to_dict(_without_formats(m), arguments_as_text=calls_as == "text") for m in messages]


def _with_written_calls(message: Message, format: CallFormat) -> Message:
    """The message with its calls as text, for a template that leaves calls out."""
    if not message.tool_calls:
        return message
    written = format.write([(call.name, call.arguments) for call in message.tool_calls])
    return replace(message, text=f"{message.text}\n{written}" if message.text else written, tool_calls=())


def _without_formats(message: Message) -> Message:
    """A call without its format, since some templates write all fields of a call."""
    if not any(call.format for call in message.tool_calls):
        return message
    return replace(message, tool_calls=tuple(replace(call, format="") for call in message.tool_calls))


def _with_short_ids(message: Message) -> Message:
    """Mistral's templates take ids of nine letters and digits alone."""

    def short(call_id: str) -> str:
        return "".join(c for c in call_id if c.isascii() and c.isalnum())[-9:].rjust(9, "0")

    calls = tuple(replace(call, id=short(call.id)) for call in message.tool_calls)
    by = None if message.tool_call_id is None else short(message.tool_call_id)
    return replace(message, tool_calls=calls, tool_call_id=by)


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
    return (
        resources.files("palestra.models.chat").joinpath("templates", f"{name}.jinja").read_text("utf-8").rstrip("\n")
    )


def _shows(tokenizer: Any, message: dict[str, str], tools: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether the probe's name, in a message or in a tool, comes out of the template."""
    messages = [message] if message["role"] == "user" else [message, {"role": "user", "content": "?"}]
    try:
        return "palestra_probe" in render(tokenizer, messages, tools)
    except TemplateRefusal:
        return False
