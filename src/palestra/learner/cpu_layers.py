"""The layers of Llama-like decoders in few passes over memory, forward and backward, for the CPU.

What a product costs there, its input and output cost again with every step between two products that reads and writes
them. So the layers are written out with their gradients: q, k and v as one product, gate and up as one, the norms'
weights multiplied into these, RoPE in place, residuals added by the products. The learner's self-check compares them
with the module's own at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.algo.batching import Tree
from palestra.engine.supported import is_llama_like, norm_epsilon, sliding_window
from palestra.learner.layers import decoder_layers
from palestra.learner.tree_attention_cpu import attend, attend_backward


class FastLayers:
    """A model's layers with quicker ones in their place for a while."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._stand_ins = [(layer, FastLayer(layer)) for layer in layers]

    @classmethod
    def of(cls, model: Any) -> FastLayers | None:
        """For a model of this shape, in float32 on the CPU; None for any other."""
        here = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
        if not here or not is_llama_like(model):
            return None
        layers = decoder_layers(model)
        return cls(layers) if all(map(_fits, layers)) else None

    @contextmanager
    def use(self) -> Iterator[None]:
        for layer, stand_in in self._stand_ins:
            layer.__dict__["forward"] = stand_in
        try:
            yield
        finally:
            for layer, _ in self._stand_ins:
                del layer.__dict__["forward"]


def _fits(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears = [*attention.children(), *mlp.children()]
    plain = all(type(m) is nn.Linear for m in linears if hasattr(m, "in_features"))  # no adapters
    unbiased = all(m.bias is None for m in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return plain and unbiased and sliding_window(attention) is None


class FastLayer:
    """Stands in for a layer's forward."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.mlp_rows: Tensor | None = None  # the tokens at which the MLP is computed; None: all

    def __call__(self, hidden_states: Tensor, *_: Any, position_embeddings: Any, layout: Any, **__: Any) -> Tensor:
        attention, mlp = self._layer.self_attn, self._layer.mlp
        norm, mlp_norm = self._layer.input_layernorm, self._layer.post_attention_layernorm
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        heads, kv_heads = (linear.out_features // attention.head_dim for linear in qkv[:2])
        head_norms = None
        if hasattr(attention, "q_norm"):
            pairs = (attention.q_norm.weight, heads), (attention.k_norm.weight, kv_heads)
            head_norms = torch.cat([weight.expand(n, -1) for weight, n in pairs])
        form = _Form(
            heads,
            kv_heads,
            attention.head_dim,
            attention.scaling,
            _epsilon(norm),
            _epsilon(attention.q_norm) if head_norms is not None else 0.0,
            layout.trees,
        )
        cos, sin = (
            (x[0, :, None] for x in position_embeddings) if getattr(attention, "use_rope", True) else (None, None)
        )
        x = _Attention.apply(
            hidden_states[0],
            torch.cat([linear.weight for linear in qkv]) * norm.weight,
            None if qkv[0].bias is None else torch.cat([linear.bias for linear in qkv]),
            head_norms,
            attention.o_proj.weight,
            cos,
            sin,
            form,
        )
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * mlp_norm.weight
        return _Mlp.apply(x, gate_up, mlp.down_proj.weight, self.mlp_rows, _epsilon(mlp_norm))[None]


@dataclass(frozen=True, slots=True)
class _Form:
    heads: int
    kv_heads: int
    dim: int
    scale: float
    epsilon: float
    head_epsilon: float
    trees: tuple[Tree, ...]


class _Attention(torch.autograd.Function):
    """x + attention of the normed x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, X]
        qkv: Tensor,  # [(H + 2 KV) * D, X], with the norm's weight
        bias: Tensor | None,
        head_norms: Tensor | None,  # [H + KV, D]
        out: Tensor,  # [X, H * D]
        cos: Tensor | None,  # [T, 1, D]
        sin: Tensor | None,
        form: _Form,
    ) -> Tensor:
        h, kv = form.heads, form.kv_heads
        normed, inverse = _norm(x, form.epsilon)
        q_k_v = F.linear(normed, qkv, bias).view(len(x), -1, form.dim)
        qk, v = q_k_v[:, : h + kv], q_k_v[:, h + kv :]
        head_normed = head_inverse = None
        if head_norms is not None:
            head_normed, head_inverse = _norm(qk, form.head_epsilon)
            qk = head_normed * head_norms
        if cos is not None and sin is not None:
            sin = torch.cat([-sin[..., : form.dim // 2], sin[..., form.dim // 2 :]], -1)  # as rotate_half does
            qk = (qk * cos).addcmul_(qk.roll(form.dim // 2, -1), sin)
        q, k = qk[:, :h], qk[:, h:]
        if h > kv:
            k, v = (each.repeat_interleave(h // kv, dim=1) for each in (k, v))
        attended, total = attend(q, k, v, form.trees, form.scale)
        ctx.save_for_backward(
            normed, inverse, qkv, head_normed, head_inverse, head_norms, q, k, v, attended, total, out, cos, sin
        )
        ctx.form, ctx.biased = form, bias is not None
        return torch.addmm(x, attended.view(len(x), -1), out.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, qkv, head_normed, head_inverse, head_norms, q, k, v, attended, total, out, cos, sin = (
            ctx.saved_tensors
        )
        form, grad, tokens = ctx.form, grads[0].contiguous(), len(normed)
        h, kv = form.heads, form.kv_heads
        by_out = grad.t() @ attended.view(tokens, -1)
        by_attended = (grad @ out).view(tokens, h, form.dim)
        dq, dk, dv = attend_backward(by_attended, q, k, v, attended, total, form.trees, form.scale)
        d = grad.new_empty(tokens, h + 2 * kv, form.dim)
        by_qk, by_v = d[:, : h + kv], d[:, h + kv :]
        by_qk[:, :h] = dq
        torch.sum(dk.view(tokens, kv, h // kv, form.dim), 2, out=by_qk[:, h:])
        torch.sum(dv.view(tokens, kv, h // kv, form.dim), 2, out=by_v)
        if cos is not None:
            rotated = (by_qk * sin).roll(form.dim // 2, -1)
            by_qk.mul_(cos).add_(rotated)
        by_head_norms = None
        if head_norms is not None:
            by_head_norms = (by_qk * head_normed).sum(0)
            _norm_backward(by_qk.mul_(head_norms), head_normed, head_inverse)
        flat = d.view(tokens, -1)
        by_x = _norm_backward(flat @ qkv, normed, inverse).add_(grad)
        by_bias = flat.sum(0) if ctx.biased else None
        return by_x, flat.t() @ normed, by_bias, by_head_norms, by_out, None, None, None


class _Mlp(torch.autograd.Function):
    """x + MLP of the normed x, at some rows or all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, rows: Tensor | None, epsilon: float) -> Tensor:
        part = x if rows is None else x.index_select(0, rows)
        normed, inverse = _norm(part, epsilon)
        gate, up = F.linear(normed, gate_up).view(len(part), 2, -1).unbind(1)
        opened = F.silu(gate)
        product = opened * up
        ctx.save_for_backward(normed, inverse, gate_up, gate, opened, up, product, down, rows)
        part = torch.addmm(part, product, down.t())
        return part if rows is None else x.index_copy(0, rows, part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, gate_up, gate, opened, up, product, down, rows = ctx.saved_tensors
        grad = grads[0] if rows is None else grads[0].index_select(0, rows)
        by_down, by_product = grad.t() @ product, grad @ down
        d = grad.new_empty(len(grad), 2, by_product.shape[1])
        torch.mul(by_product, opened, out=d[:, 1])
        torch.ops.aten.silu_backward.grad_input(by_product.mul_(up), gate, grad_input=d[:, 0])
        flat = d.view(len(grad), -1)
        by_x = _norm_backward(flat @ gate_up, normed, inverse).add_(grad)
        whole = by_x if rows is None else grads[0].index_copy(0, rows, by_x)
        return whole, flat.t() @ normed, by_down, None, None


def _epsilon(norm: nn.Module) -> float:
    epsilon = norm_epsilon(norm)
    assert epsilon is not None
    return epsilon


def _norm(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + ε), and what x was multiplied by."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return x * inverse, inverse


def _norm_backward(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    """The gradient by x, in place of the one by the normed x."""
    mean = (grad * normed).mean(-1, keepdim=True)
    return grad.addcmul_(normed, mean, value=-1.0).mul_(inverse)
