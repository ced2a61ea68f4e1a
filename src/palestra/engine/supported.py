"""Which models are plain decoders: the shape of Llama, which the lean ways of computing a step know by heart."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from palestra.engine.cpu.norms import norm_is_plain
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
    if not all(norm_is_plain(copy.deepcopy(norm).cpu().float()) for norm in norms.values()):
        return False
    if type(model.model.embed_tokens) is not nn.Embedding:
        return False
    groups = _linears(model)
    if not all(type(linear) is nn.Linear for group in groups for linear in group):
        return False
    return all(len({linear.bias is None for linear in group}) == 1 for group in groups)


def window_of(attention: Any) -> int | None:
    """How far back a layer of attention sees; None: to the beginning."""
    own, config = attention.__dict__, attention.config
    if "sliding_window" in own or config.model_type != "mistral":  # others do not heed what their config says
        return own.get("sliding_window")
    return config.sliding_window


def _linears(model: Any) -> list[list[Any]]:
    """Those that have one input and may run as one, together."""
    groups = [[model.lm_head]]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        groups += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return groups
