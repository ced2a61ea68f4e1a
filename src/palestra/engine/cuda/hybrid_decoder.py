"""Decode steps of dense decoders that mix attention with gated delta nets (Qwen3.5), in nine or ten kernels a layer.

The layers are written out as in the fast decoder: at few rows a step costs what its kernels cost to start. Prompts and
appends go through the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.cuda import recurrent_kernels
from palestra.engine.cuda.decoder_layers import Product
from palestra.engine.cuda.fast_decoder import gated, norm
from palestra.engine.cuda.paged_ops import DecodePlan, RopeAndNorm, pad
from palestra.engine.cuda.recurrent_steps import RecurrentStep, StateRows
from palestra.engine.recurrent import StateStore
from palestra.engine.supported import (
    base_linear,
    base_model,
    can_fuse,
    has_hooks,
    has_static_rope,
    norm_epsilon,
    text_config,
)

HYBRIDS = {"qwen3_5_text": "Qwen3_5ForCausalLM"}


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Attention whose query projection also gives, head by head, a gate of the output."""

    module: Any
    qkv: Product
    out: Product
    rope: RopeAndNorm


@dataclass(frozen=True, slots=True)
class HybridLayer:
    index: int
    mixer: GatedAttention | RecurrentStep
    mixer_norm: nn.Module
    mlp_norm: nn.Module
    gate_up: Product
    down: Product


class HybridDecoder:
    """Logits of one token a row. The KV is the plan's, recurrent states are the store's."""

    def __init__(self, model: Any, context: int, recurrent: Mapping[nn.Module, RecurrentStep]) -> None:
        self.model, self._recurrent = base_model(model), recurrent
        body = self.model.model
        positions = torch.arange(context, device=self.model.device).expand(3, 1, -1)  # of text, height and width
        self._cos, self._sin = (x[0].contiguous() for x in body.rotary_emb(body.embed_tokens.weight[:0], positions))
        self._place = {module: place for place, module in enumerate(recurrent)}
        self.find_weights()

    @classmethod
    def of(cls, model: Any, context: int, recurrent: Mapping[nn.Module, RecurrentStep]) -> HybridDecoder | None:
        """None for models of other families. `recurrent` has the steps of all their recurrent layers, in order."""
        return cls(model, context, recurrent) if _is_known(base_model(model), recurrent) else None

    def find_weights(self) -> None:
        """Look up the weights' tensors; to be called again after they have been moved, behind the recurrent layers'."""
        self.layers = [self._layer(i, module) for i, module in enumerate(self.model.model.layers)]
        self._head = Product.of(self.model.lm_head)

    def refresh_adapters(self) -> None:
        """Those of recurrent layers are refreshed by their own steps."""
        products = [self._head]
        for layer in self.layers:
            products += [layer.gate_up, layer.down]
            if isinstance(layer.mixer, GatedAttention):
                products += [layer.mixer.qkv, layer.mixer.out]
        for product in products:
            product.refresh_adapter()

    def _layer(self, index: int, module: Any) -> HybridLayer:
        mlp = module.mlp
        return HybridLayer(
            index=index,
            mixer=self._recurrent[module.linear_attn] if hasattr(module, "linear_attn") else self._attention(module),
            mixer_norm=module.input_layernorm,
            mlp_norm=module.post_attention_layernorm,
            gate_up=Product.of(mlp.gate_proj, mlp.up_proj),
            down=Product.of(mlp.down_proj),
        )

    def _attention(self, module: Any) -> GatedAttention:
        attention = module.self_attn
        epsilon = norm_epsilon(attention.q_norm) or 0.0
        rope = RopeAndNorm(self._cos, self._sin, attention.q_norm, attention.k_norm, epsilon, one_plus=True)
        qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
        return GatedAttention(attention, qkv, Product.of(attention.o_proj), rope)

    def decode(self, ids: Tensor, plan: DecodePlan, states: StateStore, rows: StateRows) -> Tensor:
        """Logits [rows, vocabulary]."""
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        for layer in self.layers:
            mixer, normed = layer.mixer, norm(layer.mixer_norm, x, one_plus=True)
            if isinstance(mixer, GatedAttention):
                mixer.out.add_to(x, self._attend(mixer, mixer.qkv(normed), plan))
            else:
                parts = states.parts(self._place[mixer.module])
                mixer.out.add_to(x, mixer.mix(mixer.inputs(normed), parts, rows))
            layer.down.add_to(x, gated(norm(layer.mlp_norm, x, one_plus=True), layer.gate_up))
        return self._head(norm(self.model.model.norm, x, one_plus=True))

    def _attend(self, mixer: GatedAttention, qkv: Tensor, plan: DecodePlan) -> Tensor:
        module, dim = mixer.module, mixer.module.head_dim
        heads = qkv.view(len(qkv), -1, dim)
        kv_heads = plan.keys.shape[2]
        q_and_gate, k, v = heads.tensor_split((-2 * kv_heads, -kv_heads), 1)
        out = plan.over_pages(plan.kv_layer(module), q_and_gate[:, ::2], k, v, module.scaling, 0.0, 0, mixer.rope)
        rows, count, _ = out.shape
        result = torch.empty_like(out)
        recurrent_kernels.gate_heads[(rows, count)](
            out, qkv[:, dim:], result, qkv.stride(0), H=count, D=dim, DP=pad(dim), num_warps=1
        )
        return result.flatten(1)


def _is_known(model: Any, recurrent: Mapping[nn.Module, RecurrentStep]) -> bool:
    """A decoder of a known family, with ordinary linear layers (LoRA too) and no hooks."""
    config, name = text_config(model), type(model).__name__
    own = type(model).__module__.startswith("transformers.models.")
    if not own or HYBRIDS.get(config.model_type) != name or config.hidden_act != "silu" or not has_static_rope(config):
        return False
    if has_hooks(model) or type(model.model.embed_tokens) is not nn.Embedding:
        return False
    groups: list[list[Any]] = [[model.lm_head]]
    for layer in model.model.layers:
        if not hasattr(layer, "linear_attn"):
            attention = layer.self_attn
            groups += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        elif layer.linear_attn not in recurrent:
            return False
        groups += [[layer.mlp.gate_proj, layer.mlp.up_proj], [layer.mlp.down_proj]]
    if not can_fuse(groups):
        return False
    weights = [base_linear(linear).weight for group in groups for linear in group]
    return len({(weight.dtype, weight.device) for weight in [*weights, model.model.norm.weight]}) == 1
