"""The forward of plain decoders in few kernels, for the GPU.

At few rows a step costs what its kernels cost to start, not their arithmetic. So the layers of the Llama
shape are written out: seven to nine kernels each, of which the products are mostly the library's. Residuals
are added by the products themselves, and queries and keys are normed and turned where they are read. Nothing
is compiled but these small kernels, so the first step comes in a second. The weights are the module's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.cpu.norms import norm_epsilon
from palestra.engine.cuda import layer_kernels
from palestra.engine.cuda.fuse import FusedLinears
from palestra.engine.cuda.paged_ops import DecodePlan, FeedPlan, Turning, attend_one
from palestra.engine.supported import is_plain_decoder, window_of

FEW_ROWS = 64  # up to here the gated product of our own beats the library's with a kernel behind it
GATED_SHAPE = {"BM": 64, "BN": 32, "BK": 128}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights and the pages of its KV."""

    before: nn.Module  # the norm
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Any
    between: nn.Module
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Any
    keys: Tensor
    values: Tensor
    turning: Turning
    scale: float
    window: int | None


class CudaLean:
    """Logits of a decoder whose layers are norm, attention, norm, gated MLP."""

    def __init__(self, model: Any, fused: FusedLinears, keys: Tensor, values: Tensor, context: int) -> None:
        self.model = model
        body = model.model
        positions = torch.arange(context, device=keys.device)[None]
        cos, sin = (x[0].contiguous() for x in body.rotary_emb(body.embed_tokens.weight[:0], positions))
        self.layers = [
            _layer(layer, fused, k, v, cos, sin) for layer, k, v in zip(body.layers, keys, values, strict=True)
        ]
        self.kv_heads, self.head_dim = keys.shape[2], keys.shape[4]

    @classmethod
    def of(cls, model: Any, fused: FusedLinears, keys: Tensor, values: Tensor, context: int) -> CudaLean | None:
        """For a model of this shape; None for any other."""
        return cls(model, fused, keys, values, context) if is_plain_decoder(model) else None

    def decode(self, ids: Tensor, plan: DecodePlan) -> Tensor:
        """Logits [rows, vocabulary] of one token a row."""

        def attend(layer: _Layer, qkv: Tensor) -> Tensor:
            q, k, v = qkv.split((qkv.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads), 1)
            window = layer.window or 0
            return attend_one(
                q, k, v, layer.keys, layer.values, plan.tables, plan.lens, layer.scale, 0.0, window, layer.turning
            )

        return self._logits(ids, attend)

    def feed(self, ids: Tensor, positions: Tensor, plan: FeedPlan, ends: Tensor) -> Tensor:
        """Logits [ends, vocabulary] behind several tokens of several rows."""

        def attend(layer: _Layer, qkv: Tensor) -> Tensor:
            q = plan.take(qkv, layer.keys, layer.values, positions, layer.turning)
            return plan.over_pages(q, layer.keys, layer.values, layer.scale, layer.window, None)

        return self._logits(ids, attend, ends)

    def _logits(self, ids: Tensor, attend: Any, ends: Tensor | None = None) -> Tensor:
        body = self.model.model
        x = F.embedding(ids, body.embed_tokens.weight)
        for layer in self.layers:
            qkv = F.linear(_norm(layer.before, x), layer.qkv, layer.qkv_bias)
            out = attend(layer, qkv.view(x.shape[0], -1, self.head_dim)).flatten(1)
            if ends is not None and layer is self.layers[-1]:  # from here on only what is sampled from
                x, out = x.index_select(0, ends), out.index_select(0, ends)
            _add_product(x, out, layer.out)
            _add_product(x, _gated(_norm(layer.between, x), layer), layer.down)
        head = self.model.lm_head
        return F.linear(_norm(body.norm, x), head.weight, head.bias)


def _layer(module: Any, fused: FusedLinears, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    turns = getattr(attention, "use_rope", True)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    qkv, gate_up = fused.whole(attention.q_proj), fused.whole(mlp.gate_proj)
    return _Layer(
        before=module.input_layernorm,
        qkv=qkv[0],
        qkv_bias=qkv[1],
        out=attention.o_proj,
        between=module.post_attention_layernorm,
        gate_up=gate_up[0],
        gate_up_bias=gate_up[1],
        down=mlp.down_proj,
        keys=keys,
        values=values,
        turning=Turning(
            cos=cos if turns else None,
            sin=sin if turns else None,
            q_norm=q_norm,
            k_norm=k_norm,
            epsilon=0.0 if q_norm is None else norm_epsilon(q_norm) or 0.0,
        ),
        scale=attention.scaling,
        window=window_of(attention),
    )


def _norm(module: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    layer_kernels.rms_norm[(rows,)](
        x, module.weight, out, norm_epsilon(module), WIDTH=width, BLOCK=block, num_warps=4 if block >= 1024 else 1
    )
    return out


def _gated(x: Tensor, layer: _Layer) -> Tensor:
    """silu(gate) * value of the MLP's first products."""
    (rows, depth), width = x.shape, layer.gate_up.shape[0] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    shape = GATED_SHAPE
    few = rows <= FEW_ROWS and x.dtype.itemsize == 2 and layer.gate_up_bias is None
    if few and width % shape["BN"] == 0 and depth % shape["BK"] == 0:
        grid = (width // shape["BN"], -(-rows // shape["BM"]))
        layer_kernels.gated_product[grid](x, layer.gate_up, out, rows, width, depth, **shape, num_warps=4, num_stages=3)
        return out
    both = F.linear(x, layer.gate_up, layer.gate_up_bias)
    layer_kernels.gate[(rows, -(-width // 1024))](both, out, width, BLOCK=1024, num_warps=4)
    return out


def _add_product(x: Tensor, y: Tensor, linear: Any) -> None:
    """x += linear(y), added where the product is made."""
    x.addmm_(y, linear.weight.T)
    if linear.bias is not None:
        x += linear.bias
