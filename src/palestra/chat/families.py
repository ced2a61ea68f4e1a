"""Chat templates by family: for a tokenizer that has none, and for one whose template knows no tools."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from palestra.chat.render import TemplateRefusal, render

# family -> special tokens that only its tokenizers have
_MARKS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi3": ("<|assistant|>", "<|end|>"),
}
_PROBE = {
    "type": "function",
    "function": {"name": "palestra_probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def prepare(tokenizer: Any) -> None:
    """Give the tokenizer a chat template that shows tools, if its family is known; its own stays where it can.

    What is set here is saved with the model, so other programs write exactly the same conversations.
    """
    family = family_of(tokenizer)
    if not tokenizer.chat_template and family is not None:
        tokenizer.chat_template = _read(family)
    template = tokenizer.chat_template
    if isinstance(template, str) and not _shows(tokenizer, {"role": "user", "content": "?"}, [_PROBE]):
        form = "hermes" if family == "chatml" else "json"
        place = "system" if _shows(tokenizer, {"role": "system", "content": "palestra_probe"}) else "user"
        settings = f'{{%- set call_form = "{form}" -%}}{{%- set tools_in = "{place}" -%}}\n'
        tokenizer.chat_template = settings + _read("tools") + template


def family_of(tokenizer: Any) -> str | None:
    """The family whose special tokens the tokenizer has."""
    known = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    return next((family for family, marks in _MARKS.items() if known.issuperset(marks)), None)


def _read(name: str) -> str:
    return resources.files("palestra.chat").joinpath("templates", f"{name}.jinja").read_text("utf-8").rstrip("\n")


def _shows(tokenizer: Any, message: dict[str, str], tools: Sequence[dict[str, Any]] = ()) -> bool:
    """Whether the probe's name, in a message or in a tool, comes out of the template."""
    messages = [message] if message["role"] == "user" else [message, {"role": "user", "content": "?"}]
    try:
        return "palestra_probe" in render(tokenizer, messages, tools)
    except TemplateRefusal:
        return False
