"""Rendering with a tokenizer's chat template. It comes with the model, so it may fail in any way, and may never end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.time_limit import TimeLimitError, time_limit

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
