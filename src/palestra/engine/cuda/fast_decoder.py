"""The forward of Llama-like decoders in few kernels, for the GPU.

With few rows a step takes as long as its kernels take to start, not as their arithmetic. So the layers are written out:
eight or nine kernels each, of which the matrix products are the library's. Residuals are added by the products
themselves, and RoPE is applied where queries and keys are read.
Nothing is compiled but these small kernels, so the first step comes in a second. The weights are the module's own;
LoRA adapters add two small products to each of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.cuda import exact, kernels
from palestra.engine.cuda.exact import ExactPlan
from palestra.engine.cuda.paged_ops import APPLIED_ALREADY, DecodePlan, PrefillPlan, RopeAndNorm, rope_and_store
from palestra.engine.supported import (
    FusedAdapter,
    adapted_product,
    base_linear,
    base_model,
    norm_epsilon,
    sliding_window,
)


def fuse(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of outputs, inputs] and bias [sum of outputs] of linear layers with one input, one below the other.

    The layers' parameters become views of one buffer, so nothing is held twice, and an optimizer or a policy's update
    that writes them in place keeps the buffer up to date.
    Layers that lie in one buffer already stay there, so all engines on one module share it.
    """
    with torch.inference_mode(False), torch.no_grad():  # the parameters are trained later
        weight = _in_one_buffer([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return weight, _in_one_buffer(biases) if biases else None


def _in_one_buffer(parts: Sequence[Tensor]) -> Tensor:
    first, sizes = parts[0], [len(part) for part in parts]
    if _are_adjacent(parts):
        shape = (sum(sizes), *first.shape[1:])
        return first.data.as_strided(shape, first.stride(), first.storage_offset())
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split(sizes), strict=True):
        part.data = view
    return whole


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    same_storage = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    contiguous = all(part.is_contiguous() for part in parts)
    return same_storage and contiguous and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parts))


@dataclass(frozen=True, slots=True)
class Product:
    """Linear layers with one input, as one."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    adapter: FusedAdapter | None
    exact: bool = False  # by kernels whose results do not depend on the number of rows

    @classmethod
    def of(cls, *linears: Any, exact: bool = False) -> Product:
        weight, bias = fuse([base_linear(linear) for linear in linears])
        return cls(weight, bias, FusedAdapter.of(linears), exact)

    def refresh_adapter(self) -> None:
        """Copy the adapter's weights into the fused buffers; all other weights are read in place."""
        if self.adapter is not None:
            self.adapter.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        if self.exact:
            return self._exact(x)
        if self.adapter is None:
            return F.linear(x, self.weight, self.bias)
        return adapted_product(x, self.weight, self.bias, x @ self.adapter.down.T, self.adapter.up)

    def _exact(self, x: Tensor) -> Tensor:
        adapter = self.adapter
        more = None if adapter is None else (exact.product(x, adapter.down), adapter.up)
        out = exact.product(x, self.weight, more)
        return out if self.bias is None else out.add_(self.bias)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """out += self(x), added where the products are made."""
        if self.adapter is None and self.bias is None and not self.exact:
            out.addmm_(x, self.weight.T)
        else:
            out += self(x)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    index: int
    attention_norm: nn.Module
    qkv: Product
    out: Product
    mlp_norm: nn.Module
    gate_up: Product
    down: Product
    rope: RopeAndNorm
    scale: float
    window: int | None


class CudaFastDecoder:
    """Logits of a decoder whose layers are norm, attention, norm, gated MLP. Its KV is the plan's."""

    one_plus = False  # norms multiply by 1 + weight

    def __init__(self, model: Any, context: int, exact: bool = False) -> None:
        self.model = model = base_model(model)
        self.exact = exact
        body = model.model
        positions = self._positions(torch.arange(context, device=model.device)[None])
        self._cos, self._sin = (x[0].contiguous() for x in body.rotary_emb(body.embed_tokens.weight[:0], positions))
        self.find_weights()
        self.kv_heads = model.config.num_key_value_heads
        self.head_dim = next(layer.self_attn.head_dim for layer in body.layers if hasattr(layer, "self_attn"))

    def _positions(self, positions: Tensor) -> Tensor:
        """Positions [1, T] as the model's RoPE takes them."""
        return positions

    def find_weights(self) -> None:
        """Look up the weights' tensors; to be called again after they have been moved."""
        self.layers = [self._layer(i, layer) for i, layer in enumerate(self.model.model.layers)]
        self._head = Product.of(self.model.lm_head, exact=self.exact)

    def _layer(self, index: int, module: Any) -> Layer:
        attention, exact = module.self_attn, self.exact
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        epsilon = 0.0 if q_norm is None else norm_epsilon(q_norm) or 0.0
        cos, sin = (self._cos, self._sin) if getattr(attention, "use_rope", True) else (None, None)
        rope = RopeAndNorm(cos, sin, q_norm=q_norm, k_norm=k_norm, epsilon=epsilon, one_plus=self.one_plus)
        qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj, exact=exact)
        out = Product.of(attention.o_proj, exact=exact)
        return self._with_mlp(index, module, qkv, out, rope, attention.scaling, sliding_window(attention))

    def _with_mlp(
        self, index: int, module: Any, qkv: Product, out: Product, rope: RopeAndNorm = APPLIED_ALREADY,
        scale: float = 1.0, window: int | None = None,
    ) -> Layer:  # fmt: skip
        gate_up = Product.of(module.mlp.gate_proj, module.mlp.up_proj, exact=self.exact)
        down = Product.of(module.mlp.down_proj, exact=self.exact)
        first, second = module.input_layernorm, module.post_attention_layernorm
        return Layer(index, first, qkv, out, second, gate_up, down, rope, scale, window)

    def refresh_adapters(self) -> None:
        for layer in self.layers:
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
                product.refresh_adapter()
        self._head.refresh_adapter()

    def decode(self, ids: Tensor, plan: DecodePlan) -> Tensor:
        """Logits [rows, vocabulary] of one token a row."""

        def attend(layer: Layer, qkv: Tensor) -> Tensor:
            q, k, v = self._heads(qkv).tensor_split((-2 * self.kv_heads, -self.kv_heads), 1)
            return plan.over_pages(layer.index, q, k, v, layer.scale, 0.0, layer.window or 0, layer.rope).flatten(1)

        return self._logits(ids, attend)

    def decode_exact(self, plan: ExactPlan) -> Tensor:
        """Logits [tokens, vocabulary] of each token, by the kernels of `exact`."""
        return self._logits(plan.ids, self.attend_with(plan))

    def prefill(self, plan: PrefillPlan) -> None:
        """Store the KV of several tokens of several rows."""

        def attend(layer: Layer, qkv: Tensor) -> Tensor | None:
            keys, values = plan.keys[layer.index], plan.values[layer.index]
            q = rope_and_store(self._heads(qkv), keys, values, plan.pages, plan.positions, layer.rope)
            if layer is self.layers[-1]:  # prefill needs the last layer's KV, not its output
                return None
            return plan.over_pages(q, keys, values, layer.scale, layer.window, None).flatten(1)

        self._hidden(plan.ids, attend)

    def prefill_exact(self, plan: ExactPlan) -> None:
        """Store the KV of a plan's tokens, by the kernels of `exact`."""
        self._hidden(plan.ids, self.attend_with(plan))

    def attend_with(self, plan: ExactPlan) -> Callable[[Layer, Tensor], Tensor]:
        """Attention of layers over the pages of a plan."""

        def attend(layer: Layer, qkv: Tensor) -> Tensor:
            return plan.over_pages(layer.index, self._heads(qkv), layer.scale, layer.window or 0, layer.rope).flatten(1)

        return attend

    def run_layer(self, layer: Layer, x: Tensor, attend: Callable[[Layer, Tensor], Tensor | None]) -> bool:
        """Run one layer over the tokens' states, in their place; False if its attention returns None."""
        out = attend(layer, layer.qkv(norm(layer.attention_norm, x, self.one_plus)))
        if out is None:
            return False
        layer.out.add_to(x, out)
        layer.down.add_to(x, gated(norm(layer.mlp_norm, x, self.one_plus), layer.gate_up))
        return True

    def _heads(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), -1, self.head_dim)

    def _logits(self, ids: Tensor, attend: Callable[[Layer, Tensor], Tensor | None]) -> Tensor:
        return self._head(norm(self.model.model.norm, self._hidden(ids, attend), self.one_plus))

    def _hidden(self, ids: Tensor, attend: Callable[[Layer, Tensor], Tensor | None]) -> Tensor:
        """The hidden states of the tokens, up to the first layer whose attention returns None."""
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        for layer in self.layers:
            if not self.run_layer(layer, x, attend):
                break
        return x


def norm(module: Any, x: Tensor, one_plus: bool = False) -> Tensor:
    """The RMS norm of rows; `one_plus`: its factor is 1 + weight."""
    out = torch.empty_like(x)
    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    kernels.rms_norm[(rows,)](
        x, module.weight, out, norm_epsilon(module), WIDTH=width, BLOCK=block, ONE_PLUS=one_plus,
        num_warps=4 if block >= 1024 else 1,
    )  # fmt: skip
    return out


def gated(x: Tensor, gate_up: Product) -> Tensor:
    """silu(gate) * value of the MLP's first products."""
    rows, width = len(x), gate_up.weight.shape[0] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    kernels.gate[(rows, -(-width // 1024))](gate_up(x), out, width, BLOCK=1024, num_warps=4)
    return out
