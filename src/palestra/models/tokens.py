"""Defaults for a tokenizer and its model, set after loading: padding, end-of-turn tokens, chat template."""

from __future__ import annotations

from typing import Any

from palestra.chat.render import prepare
from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError

_PADS = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|endoftext|>", "<unk>")


def set_tokenizer_defaults(tokenizer: Any) -> None:
    """A padding token from the vocabulary, and a chat template with tools if the model family is known."""
    if tokenizer.pad_token_id is None:
        vocab = tokenizer.get_vocab()
        tokenizer.pad_token = next((pad for pad in _PADS if pad in vocab), tokenizer.eos_token)
    prepare(tokenizer)


def set_model_defaults(model: Any, tokenizer: Any) -> None:
    """The tokenizer's padding and end-of-turn tokens for the model too: `generate` stops where a turn ends."""
    generation = model.generation_config
    eos = generation.eos_token_id
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos]) | set(_end_ids(tokenizer))
    ends = {end for end in ends if 0 <= end < model.config.get_text_config().vocab_size}
    generation.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
    generation.pad_token_id = model.config.pad_token_id = tokenizer.pad_token_id


def _end_ids(tokenizer: Any) -> tuple[int, ...]:
    try:
        return ChatFormat(tokenizer).stop_token_ids
    except PalestraError:  # no chat template: text ends at eos
        return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
