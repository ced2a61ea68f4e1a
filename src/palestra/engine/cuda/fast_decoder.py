"""The forward of Llama-like decoders in few kernels, for the GPU.

At few rows a step costs what its kernels cost to start, not their arithmetic. So the layers are written out:
seven to nine kernels each, of which the matrix products are mostly the library's. Residuals are added by the
products themselves, and RoPE is applied where queries and keys are read. Nothing is compiled but these small
kernels, so the first step comes in a second. The weights are the module's own; LoRA adapters add two small
products to each of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.cuda import layer_kernels
from palestra.engine.cuda.drafts import DraftPlan
from palestra.engine.cuda.fuse import fuse
from palestra.engine.cuda.paged_ops import DecodePlan, PrefillPlan, RopeAndNorm, rope_and_store
from palestra.engine.lora import FusedAdapter, base_linear, base_model
from palestra.engine.supported import norm_epsilon, sliding_window

MAX_GATED_ROWS = 64  # up to here the gated product of our own beats the library's with a kernel behind it
GATED_SHAPE = {"BM": 64, "BN": 32, "BK": 128}


@dataclass(frozen=True, slots=True)
class _Product:
    """Linear layers with one input, as one."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    adapter: FusedAdapter | None

    @classmethod
    def of(cls, *linears: Any) -> _Product:
        weight, bias = fuse([base_linear(linear) for linear in linears])
        return cls(weight, bias, FusedAdapter.of(linears))

    def __call__(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        if self.adapter is not None:
            self.adapter.add(out, x)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += self(x), added where the products are made."""
        out.addmm_(x, self.weight.T)
        if self.bias is not None:
            out += self.bias
        if self.adapter is not None:
            self.adapter.add(out, x)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights."""

    index: int
    attention_norm: nn.Module
    qkv: _Product
    out: _Product
    mlp_norm: nn.Module
    gate_up: _Product
    down: _Product
    rope: RopeAndNorm
    scale: float
    window: int | None


class CudaFastDecoder:
    """Logits of a decoder whose layers are norm, attention, norm, gated MLP. Its KV is the plan's."""

    def __init__(self, model: Any, context: int) -> None:
        self.model = model = base_model(model)
        body = model.model
        positions = torch.arange(context, device=model.device)[None]
        self._cos, self._sin = (x[0].contiguous() for x in body.rotary_emb(body.embed_tokens.weight[:0], positions))
        self.find_weights()
        self.kv_heads, self.head_dim = model.config.num_key_value_heads, body.layers[0].self_attn.head_dim

    def find_weights(self) -> None:
        """Note where the weights are; again after somebody has moved them."""
        self._layers = [_layer(i, layer, self._cos, self._sin) for i, layer in enumerate(self.model.model.layers)]
        self._head = _Product.of(self.model.lm_head)

    def refresh_adapters(self) -> None:
        """Copy the adapters' weights anew; everything else is read where it is."""
        for layer in self._layers:
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if product.adapter is not None:
                    product.adapter.refresh()
        if self._head.adapter is not None:
            self._head.adapter.refresh()

    def decode(self, ids: Tensor, plan: DecodePlan) -> Tensor:
        """Logits [rows, vocabulary] of one token a row."""

        def attend(layer: _Layer, qkv: Tensor) -> Tensor:
            q, k, v = qkv.split((qkv.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads), 1)
            return plan.over_pages(layer.index, q, k, v, layer.scale, 0.0, layer.window or 0, layer.rope)

        return self._head(_norm(self.model.model.norm, self._hidden(ids, attend)))

    def verify(self, plan: DraftPlan) -> Tensor:
        """Logits [tokens, vocabulary] behind each row's last token and its drafts."""

        def attend(layer: _Layer, qkv: Tensor) -> Tensor:
            return plan.over_pages(layer.index, qkv, layer.scale, layer.window or 0, layer.rope)

        return self._head(_norm(self.model.model.norm, self._hidden(plan.ids, attend)))

    def prefill(self, plan: PrefillPlan) -> None:
        """Store the KV of several tokens of several rows."""

        def attend(layer: _Layer, qkv: Tensor) -> Tensor | None:
            keys, values = plan.keys[layer.index], plan.values[layer.index]
            q = rope_and_store(qkv, keys, values, plan.pages, plan.positions, layer.rope)
            if layer is self._layers[-1]:  # its KV is stored: nobody reads what comes behind it
                return None
            return plan.over_pages(q, keys, values, layer.scale, layer.window, None)

        self._hidden(plan.ids, attend)

    def _hidden(self, ids: Tensor, attend: Callable[[_Layer, Tensor], Tensor | None]) -> Tensor:
        """What the layers make of the tokens; they end with one whose attention gives nothing."""
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        for layer in self._layers:
            qkv = layer.qkv(_norm(layer.attention_norm, x))
            out = attend(layer, qkv.view(x.shape[0], -1, self.head_dim))
            if out is None:
                break
            layer.out.add_to(x, out.flatten(1))
            layer.down.add_to(x, _gated(_norm(layer.mlp_norm, x), layer.gate_up))
        return x


def _layer(index: int, module: Any, cos: Tensor, sin: Tensor) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    has_rope = getattr(attention, "use_rope", True)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return _Layer(
        index=index,
        attention_norm=module.input_layernorm,
        qkv=_Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
        out=_Product.of(attention.o_proj),
        mlp_norm=module.post_attention_layernorm,
        gate_up=_Product.of(mlp.gate_proj, mlp.up_proj),
        down=_Product.of(mlp.down_proj),
        rope=RopeAndNorm(
            cos=cos if has_rope else None,
            sin=sin if has_rope else None,
            q_norm=q_norm,
            k_norm=k_norm,
            epsilon=0.0 if q_norm is None else norm_epsilon(q_norm) or 0.0,
        ),
        scale=attention.scaling,
        window=sliding_window(attention),
    )


def _norm(module: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    layer_kernels.rms_norm[(rows,)](
        x, module.weight, out, norm_epsilon(module), WIDTH=width, BLOCK=block, num_warps=4 if block >= 1024 else 1
    )
    return out


def _gated(x: Tensor, gate_up: _Product) -> Tensor:
    """silu(gate) * value of the MLP's first products."""
    (rows, depth), width = x.shape, gate_up.weight.shape[0] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    shape = GATED_SHAPE
    few = rows <= MAX_GATED_ROWS and x.dtype.itemsize == 2
    bare = gate_up.bias is None and gate_up.adapter is None
    if few and bare and width % shape["BN"] == 0 and depth % shape["BK"] == 0:
        grid = (width // shape["BN"], -(-rows // shape["BM"]))
        layer_kernels.gated_product[grid](
            x, gate_up.weight, out, rows, width, depth, **shape, num_warps=4, num_stages=3
        )
        return out
    layer_kernels.gate[(rows, -(-width // 1024))](gate_up(x), out, width, BLOCK=1024, num_warps=4)
    return out
