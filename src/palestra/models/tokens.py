"""Padding, ends of turns and chat template of a tokenizer and its model, set right after loading."""

from __future__ import annotations

from typing import Any

from palestra.chat.families import prepare
from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError

_PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|endoftext|>", "<unk>")


def settle_tokenizer(tokenizer: Any) -> None:
    """A padding token that is in the vocabulary, and a chat template that shows tools where the family is known."""
    if tokenizer.pad_token_id is None:
        known = tokenizer.get_vocab()
        tokenizer.pad_token = next((pad for pad in _PADS if pad in known), tokenizer.eos_token)
    prepare(tokenizer)


def settle_model(model: Any, tokenizer: Any) -> None:
    """The model's own idea of padding and of ends, the same as the tokenizer's: `generate` stops where a chat does."""
    generation = model.generation_config
    given = generation.eos_token_id
    ends = set(given if isinstance(given, list) else [] if given is None else [given]) | set(_ends(tokenizer))
    ends = {end for end in ends if 0 <= end < model.config.get_text_config().vocab_size}
    generation.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
    generation.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


def _ends(tokenizer: Any) -> tuple[int, ...]:
    try:
        return ChatFormat(tokenizer).stop_token_ids
    except PalestraError:  # no chat template: plain text ends at eos
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
