"""Which models the fast decoders can run (the shape of Llama), and whose decode steps a CUDA graph can hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.lora import base_linear, base_model, is_linear
from palestra.engine.probe import has_experts, text_config

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # others change with the length
CAPTURABLE_EXPERTS = ("grouped_mm", "batched_mm")


def is_llama_like(model: Any) -> bool:
    """A Hugging Face decoder of a known family, with ordinary linear layers (LoRA too) and norms, and no hooks."""
    config, model = text_config(model), base_model(model)
    own = type(model).__module__.startswith(f"transformers.models.{config.model_type}.")
    if config.model_type not in LLAMA_LIKE or not own or config.hidden_act not in ("silu", "swish"):
        return False
    if not _has_static_rope(config):
        return False
    if len({(p.dtype, p.device) for name, p in model.named_parameters() if ".lora_" not in name}) > 1:
        return False
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules()):
        return False
    norms = {type(m): m for m in model.modules() if type(m).__name__.endswith("RMSNorm")}
    if not all(is_standard_rms_norm(copy.deepcopy(norm).cpu().float()) for norm in norms.values()):
        return False
    if type(model.model.embed_tokens) is not nn.Embedding:
        return False
    groups = _linears(model)
    if not all(is_linear(linear) for group in groups for linear in group):
        return False
    return all(len({base_linear(linear).bias is None for linear in group}) == 1 for group in groups)


def can_capture(model: Any) -> bool:
    """Whether a forward never waits for the GPU: experts called in turn do, and RoPE that changes with the length."""
    config = text_config(model)
    if has_experts(config) and getattr(config, "_experts_implementation", None) not in CAPTURABLE_EXPERTS:
        return False
    return _has_static_rope(config)


def _has_static_rope(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return all(p.get("rope_type", "default") in STATIC_ROPE for p in by_layer_type)


def sliding_window(attention: Any) -> int | None:
    """How far back a layer of attention sees; None: to the beginning."""
    own, config = attention.__dict__, attention.config
    if "sliding_window" in own or config.model_type != "mistral":  # the others ignore what their config says
        return own.get("sliding_window")
    return config.sliding_window


def norm_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm with a weight vector; None when it is something else."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    return epsilon if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(epsilon, float) else None


@torch.no_grad()
def is_standard_rms_norm(module: nn.Module) -> bool:
    """Whether the norm gives torch's numbers (some families scale by 1 + weight)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if weight.dtype != torch.float32:
        return False  # half precision rounds in another order
    x = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
    expected = F.rms_norm(x, weight.shape, weight, norm_epsilon(module))
    return torch.allclose(module(x), expected, rtol=1e-5, atol=1e-6)


def _linears(model: Any) -> list[list[Any]]:
    """Those that have one input and may run as one product, together."""
    groups = [[model.lm_head]]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        groups += [[mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    return groups
