"""Rendering with a tokenizer's chat template. It comes with the model, so it may fail in any way, and may never end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from palestra.core.errors import PalestraError
from palestra.core.messages import to_dict
from palestra.core.time_limit import TimeLimitError, time_limit
from palestra.core.types import Message, ToolCall
from palestra.models.chat.callformats import CallFormat

_CallsAs = Literal["object", "text", "content"]
_TRIED: tuple[_CallsAs, ...] = ("object", "text")
_QUESTION = "PALESTRAQUESTION"
# A tool to examine templates with.
PROBE = {
    "type": "function",
    "function": {"name": "palestra_probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
RENDER_S = 10.0  # a real template takes milliseconds


class TemplateRefusal(PalestraError):
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
        raise PalestraError(
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
        **variables: Any,
    ) -> str:
        """The conversation as the template writes it."""
        has_calls = any(message.tool_calls or message.tool_call_id for message in messages)
        plain = self._plain(messages, self._calls_as) if has_calls else [to_dict(message) for message in messages]
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
