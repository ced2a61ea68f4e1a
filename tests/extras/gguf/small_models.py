"""A small model of each family that prefers some tokens to others, as real models do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from small_tokenizers import CORPUS, LLAMA3, make_byte_level, make_sentencepiece

WINDOW = 24  # far shorter than the longest prompts
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.2 * i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}


def _gemma_tokenizer() -> Any:
    return make_sentencepiece(space_prefix=False)


@dataclass(frozen=True)
class Family:
    config: type
    tokenizer: Callable[[], Any]
    settings: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama3": Family(
        transformers.LlamaConfig,
        lambda: make_byte_level(LLAMA3, ignore_merges=True, bos=True),
        {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False},
    ),
    "llama2": Family(
        transformers.LlamaConfig, make_sentencepiece, {"tie_word_embeddings": True, "attention_bias": True}
    ),
    "mistral": Family(transformers.MistralConfig, make_sentencepiece, {"head_dim": 32, "sliding_window": 128}),
    "qwen2": Family(transformers.Qwen2Config, make_byte_level, {"rope_parameters": _YARN_ROPE}),
    "qwen3": Family(transformers.Qwen3Config, make_byte_level, {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": Family(transformers.Gemma2Config, _gemma_tokenizer, _GEMMA),
    "gemma3": Family(transformers.Gemma3TextConfig, _gemma_tokenizer, {**_GEMMA, "num_hidden_layers": 7}),
    "phi3": Family(
        transformers.Phi3Config,
        lambda: make_sentencepiece(phi=True),
        {
            "pad_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 3,
            "sliding_window": None,
            "rope_parameters": _LONG_ROPE,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
        },
    ),
}


def _random(family: str) -> tuple[Any, Any]:
    """The family's small model and its tokenizer. Three rows have no token."""
    kind, tokenizer = FAMILIES[family], FAMILIES[family].tokenizer()
    torch.manual_seed(0)
    config = kind.config(**{**_SHAPE, "vocab_size": len(tokenizer) + 3, **kind.settings})
    # eager: transformers' other ways of attention leave out what softcaps logits (gemma2), which llama.cpp does
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that do nothing would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval(), tokenizer


@cache
def sharp(family: str) -> tuple[Any, Any]:
    """One with weights so large that it prefers some tokens, and positions, to others without a training."""
    model, tokenizer = _random(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model, tokenizer


@cache
def trained(family: str) -> tuple[Any, Any]:
    """One that knows the corpus well."""
    model, tokenizer = _random(family)
    model.train()
    lines = [tokenizer(line).input_ids for line in CORPUS]
    longest = max(map(len, lines))
    inputs = torch.tensor([line + line[-1:] * (longest - len(line)) for line in lines])
    labels = torch.tensor([line + [-100] * (longest - len(line)) for line in lines])
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(40):
        loss = model(inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), tokenizer


def prompts_of(tokenizer: Any) -> list[list[int]]:
    """Twenty prompts: parts of every line, and two that are longer than any window."""
    lines = [tokenizer(line).input_ids for line in CORPUS]
    joined = [token_id for line in lines for token_id in line]
    return [line[:end] for line in lines for end in (7, 15, len(line))] + [joined[:100], joined[:120]]
