"""Small random models of every family that the engine promises to run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mistral": {"sliding_window": 7},
    "gemma2": {"head_dim": 32, "sliding_window": 7, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 7},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "granite": {},
}


def tiny_model(family: str, **changes: Any) -> Any:
    """A random float32 model, its weights scaled up so that its logits differ clearly."""
    extra = {**FAMILIES.get(family, {}), **changes}
    config = AutoConfig.for_model(family, **{**COMMON, **extra})
    torch.manual_seed(0)
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # which sdpa would leave out
    attention = {"attn_implementation": "eager"} if capped else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model
