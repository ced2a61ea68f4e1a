"""The forward of Llama-like decoders in few calls, for the CPU.

At a few rows a step costs what its calls cost, not its arithmetic. So the layers are written out here with the
weights laid out for small matrix products: q, k and v as one, transposed, the norms' weights multiplied in, LoRA
adapters added. The copies are made again when the weights change. The engine's self-check compares it with the
module at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.attention import AttentionPlan, ScoreRule
from palestra.engine.supported import (
    LowRank,
    adapter_of,
    base_linear,
    base_model,
    is_llama_like,
    linear_groups,
    norm_epsilon,
    sliding_window,
    text_config,
)

MAX_WEIGHT_BYTES = 2 << 30  # beyond this a second copy of the weights takes too much memory


class _Linear(NamedTuple):
    weight: Tensor  # [in, out]
    bias: Tensor | None


Sources = list[tuple[nn.Linear, LowRank | None]]  # linear layers with the same input, and their adapters


@dataclass(slots=True)
class _Weights:
    """One layer's, with the norm before them multiplied in."""

    qkv: _Linear
    out: _Linear
    gate: _Linear
    up: _Linear
    down: _Linear
    qk_norm: Tensor | None  # [H + KV, D]
    rule: ScoreRule


class CpuFastDecoder:
    """Logits of a decoder whose layers are norm, attention, norm, gated MLP."""

    def __init__(self, model: Any) -> None:
        config = text_config(model)
        self._parameters = list(model.parameters())
        self.model = model = base_model(model)
        attention = model.model.layers[0].self_attn
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = attention.head_dim
        self._norms = {"hidden": _Norm(model.model.norm), "head": _Norm(getattr(attention, "q_norm", None))}
        groups: list[Sources] = [[(base_linear(each), adapter_of(each)) for each in g] for g in linear_groups(model)]
        self._head_source = groups[0]
        self._sources = list(zip(groups[1::4], groups[2::4], groups[3::4], groups[4::4], strict=True))  # of each layer
        self._rules = [ScoreRule(x.self_attn.scaling, sliding_window(x.self_attn)) for x in model.model.layers]
        self._copied_version: int | None = None
        self._layers: list[_Weights] = []
        self._head = _NO_HEAD
        self._cos = self._sin = torch.empty(0, 1, self.head_dim)

    @classmethod
    def of(cls, model: Any) -> CpuFastDecoder | None:
        """For a model of this shape, in float32 and not too large; None for any other."""
        parameters = list(model.parameters())
        here = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)
        small = sum(p.nbytes for p in parameters) <= MAX_WEIGHT_BYTES
        return cls(model) if here and small and is_llama_like(model) else None

    def weights_changed(self) -> None:
        self._copied_version = None

    def release_memory(self) -> None:
        """Drop the copies of the weights; the next call makes them again."""
        self._copied_version, self._layers, self._head = None, [], _NO_HEAD

    def __call__(self, ids: list[int], positions: list[int], ends: list[int], plan: AttentionPlan) -> Tensor:
        """Logits [ends, vocabulary] for a step's tokens at their positions; `ends` says which of them sample."""
        # A write in place raises a tensor's version, except by a fused optimizer: it calls for `weights_changed`.
        version = sum(map(attrgetter("_version"), self._parameters))
        if version != self._copied_version:
            self._copy_weights()
            self._copied_version = version
        if max(positions) >= len(self._cos):
            self._extend_rope(max(positions) + 1)
        places, norm = torch.tensor(positions), self._norms["hidden"]
        cos, sin = self._cos.index_select(0, places), self._sin.index_select(0, places)
        x = self.model.model.embed_tokens(torch.tensor(ids))
        for module, weights in zip(self.model.model.layers, self._layers, strict=True):
            out = self._attention(x, module.self_attn, weights, cos, sin, plan)
            if weights is self._layers[-1] and len(ends) < len(ids):  # from here on only what is sampled from
                sampled = torch.tensor(ends, dtype=torch.long)
                x, out = x.index_select(0, sampled), out.index_select(0, sampled)
            x = _add_product(x, out, weights.out)
            normed = norm(x)
            gate = F.silu(_product(normed, weights.gate), inplace=True)
            gate.mul_(_product(normed, weights.up))
            x = _add_product(x, gate, weights.down)
        return _product(norm(x), self._head)

    def _attention(
        self, x: Tensor, module: Any, weights: _Weights, cos: Tensor, sin: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """The heads' outputs side by side [N, H * D], before their output product."""
        qkv = _product(self._norms["hidden"](x), weights.qkv).view(x.shape[0], -1, self.head_dim)
        qk = qkv[:, : self.heads + self.kv_heads]
        if weights.qk_norm is not None:
            self._norms["head"](qk, out=qk).mul_(weights.qk_norm)
        if getattr(module, "use_rope", True):
            rotated = qk.roll(self.head_dim // 2, -1)
            qk.mul_(cos).addcmul_(rotated, sin)
        q, k, v = qkv.transpose(0, 1)[None].split((self.heads, self.kv_heads, self.kv_heads), 1)
        return plan.attend(module, q, k, v, weights.rule).reshape(x.shape[0], -1)

    def _copy_weights(self) -> None:
        hidden, head = self._norms["hidden"].factor, self._norms["head"].factor
        self._layers = []
        for layer, rule, sources in zip(self.model.model.layers, self._rules, self._sources, strict=True):
            attention = layer.self_attn
            qkv, out, (gate, up), down = sources
            attention_norm = layer.input_layernorm.weight * hidden
            mlp_norm = layer.post_attention_layernorm.weight * hidden
            qk_norm = None
            if hasattr(attention, "q_norm"):
                of_q, of_k = attention.q_norm.weight, attention.k_norm.weight
                qk_norm = torch.cat([of_q.expand(self.heads, -1), of_k.expand(self.kv_heads, -1)]) * head
            weights = _Weights(
                qkv=_scaled(qkv, attention_norm),
                out=_scaled(out),
                gate=_scaled([gate], mlp_norm),
                up=_scaled([up], mlp_norm),
                down=_scaled(down),
                qk_norm=qk_norm,
                rule=rule,
            )
            self._layers.append(weights)
        self._head = _scaled(self._head_source, self.model.model.norm.weight * hidden)

    def _extend_rope(self, length: int) -> None:
        """The model's own tables [positions, 1, D], twice as long as needed now; the sine has rotate_half's signs."""
        positions = torch.arange(max(256, 2 * length))[None]
        cos, sin = self.model.model.rotary_emb(torch.empty(0), positions)
        signs = torch.ones(self.head_dim)
        signs[: self.head_dim // 2] = -1.0
        self._cos, self._sin = cos[0, :, None], (sin * signs)[0, :, None]


class _Norm:
    """x / sqrt(mean(x²) + ε) without the constant √d, which is multiplied into the weights that follow."""

    def __init__(self, module: Any) -> None:
        width = 1 if module is None else len(module.weight)
        epsilon = 0.0 if module is None else norm_epsilon(module)
        assert epsilon is not None
        self.factor = width**0.5
        self._floor = torch.tensor((epsilon * width) ** 0.5)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, length.hypot_(self._floor), out=out)


_NO_HEAD = _Linear(torch.empty(0), None)


def _product(x: Tensor, linear: _Linear) -> Tensor:
    return torch.mm(x, linear.weight) if linear.bias is None else torch.addmm(linear.bias, x, linear.weight)


def _add_product(x: Tensor, y: Tensor, linear: _Linear) -> Tensor:
    x = torch.addmm(x, y, linear.weight)
    return x if linear.bias is None else x.add_(linear.bias)


def _scaled(linears: Sources, norm: Tensor | None = None) -> _Linear:
    """Linear layers side by side, their adapters added, their input scaled by a norm's weight."""
    weights: list[Tensor] = []
    biases: list[Any] = []
    for base, adapter in linears:
        own: Tensor = base.weight
        if adapter is not None:
            own = torch.addmm(own, adapter.up, adapter.down, alpha=adapter.scaling)
        weights.append(own.t())
        biases.append(base.bias)
    weight = torch.cat(weights, dim=1)
    bias = biases[0] if len(biases) == 1 or biases[0] is None else torch.cat(biases)
    return _Linear(weight if norm is None else weight.mul_(norm[:, None]), bias)
