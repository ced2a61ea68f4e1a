"""Which models are plain decoders: the shape of Llama, which the lean ways of computing a step know by heart."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from palestra.engine.norms import norm_is_plain
from palestra.engine.probe import text_config

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # others change with the length


def is_plain_decoder(model: Any) -> bool:
    """A Hugging Face decoder of a known family, with plain linear layers and norms, and nothing hooked in."""
    config = text_config(model)
    own = type(model).__module__.startswith(f"transformers.models.{config.model_type}.")
    if config.model_type not in KNOWN or not own or config.hidden_act not in ("silu", "swish"):
        return False
    if config.rope_parameters.get("rope_type", "default") not in STATIC_ROPE:
        return False
    if len({(p.dtype, p.device) for p in model.parameters()}) > 1:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules()):
        return False
    norms = {type(m): m for m in model.modules() if type(m).__name__.endswith("RMSNorm")}
    plain = all(norm_is_plain(copy.deepcopy(norm).cpu().float()) for norm in norms.values())
    return plain and all(type(linear) is nn.Linear for linear in _linears(model))


def window_of(attention: Any) -> int | None:
    """How far back a layer of attention sees; None: to the beginning."""
    own = attention.__dict__
    return own["sliding_window"] if "sliding_window" in own else getattr(attention.config, "sliding_window", None)


def _linears(model: Any) -> list[nn.Module]:
    layers = model.model.layers
    attention = [
        getattr(layer.self_attn, name) for layer in layers for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    mlp = [getattr(layer.mlp, name) for layer in layers for name in ("gate_proj", "up_proj", "down_proj")]
    return [*attention, *mlp, model.lm_head]
