"""Can the engine run this model? Find the shape of its KV, or refuse it by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.core.errors import UnsupportedModel
from palestra.engine.attention import ENGINE_ATTENTION, REMEDY, AttentionSwitch
from palestra.engine.kv_shape import KVShape

KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(slots=True)
class ShapeProbe:
    """An attention plan that computes causal attention without a cache and notes the KV shape of each layer."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.layers[layer] = (k.shape[1], k.shape[3], v.shape[3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def text_config(model: nn.Module) -> Any:
    """The config of the language model inside, whatever wraps it."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]


def has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def kv_shape(model: Any) -> KVShape:
    """Run two tokens through the model and read the shape of its KV; UnsupportedModel when it has another memory."""
    config = text_config(model)
    name = config.model_type
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS)
    if foreign:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(foreign)}; the paged engine knows attention only; {REMEDY}"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{name} does not attend through transformers' attention interface, which the paged engine needs; {REMEDY}"
        )
    probe = ShapeProbe()
    device = next(model.parameters()).device
    with torch.inference_mode(), AttentionSwitch(model).use(ENGINE_ATTENTION, training=False):
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        model(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False, plan=probe)
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise UnsupportedModel(
            f"{name} has {config.num_hidden_layers} layers and {len(probe.layers)} of them attend through the "
            f"attention interface; the paged engine needs all; {REMEDY}"
        )
    shapes = set(probe.layers.values())
    if len(shapes) > 1:
        raise UnsupportedModel(f"{name} has layers of different KV shapes {sorted(shapes)}; {REMEDY}")
    heads, key_dim, value_dim = shapes.pop()
    return KVShape(config.num_hidden_layers, heads, key_dim, value_dim, model.dtype)
