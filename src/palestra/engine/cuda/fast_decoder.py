"""The forward of Llama-like decoders in few kernels, for the GPU.

With few rows a step takes as long as its kernels take to start, not as their arithmetic. So the layers are written out:
eight or nine kernels each, of which the matrix products are the library's. Residuals are added by the products
themselves, and RoPE is applied where queries and keys are read.
Nothing is compiled but these small kernels, so the first step comes in a second. The weights are the module's own;
LoRA adapters add two small products to each of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.engine.cuda import layer_kernels
from palestra.engine.cuda.decoder_layers import Layer, Product, layer_of
from palestra.engine.cuda.exact import ExactPlan
from palestra.engine.cuda.paged_ops import DecodePlan, PrefillPlan, rope_and_store
from palestra.engine.supported import base_model, norm_epsilon


class CudaFastDecoder:
    """Logits of a decoder whose layers are norm, attention, norm, gated MLP. Its KV is the plan's."""

    def __init__(self, model: Any, context: int, exact: bool = False) -> None:
        self.model = model = base_model(model)
        self.exact = exact
        body = model.model
        positions = torch.arange(context, device=model.device)[None]
        self._cos, self._sin = (x[0].contiguous() for x in body.rotary_emb(body.embed_tokens.weight[:0], positions))
        self.find_weights()
        self.kv_heads, self.head_dim = model.config.num_key_value_heads, body.layers[0].self_attn.head_dim

    def find_weights(self) -> None:
        """Look up the weights' tensors; to be called again after they have been moved."""
        rope, exact = (self._cos, self._sin), self.exact
        self.layers = [layer_of(i, layer, *rope, exact) for i, layer in enumerate(self.model.model.layers)]
        self._head = Product.of(self.model.lm_head, exact=exact)

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

        return self._head(norm(self.model.model.norm, self._hidden(ids, attend)))

    def decode_exact(self, plan: ExactPlan) -> Tensor:
        """Logits [tokens, vocabulary] of each token, by the kernels of `exact`."""
        return self._head(norm(self.model.model.norm, self._hidden(plan.ids, self.attend_with(plan))))

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
        """One layer over the tokens' states, in their place; false if its attention gives nothing."""
        out = attend(layer, layer.qkv(norm(layer.attention_norm, x)))
        if out is None:
            return False
        layer.out.add_to(x, out)
        layer.down.add_to(x, gated(norm(layer.mlp_norm, x), layer.gate_up))
        return True

    def _heads(self, qkv: Tensor) -> Tensor:
        return qkv.view(len(qkv), -1, self.head_dim)

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
    layer_kernels.rms_norm[(rows,)](
        x, module.weight, out, norm_epsilon(module), WIDTH=width, BLOCK=block, ONE_PLUS=one_plus,
        num_warps=4 if block >= 1024 else 1,
    )  # fmt: skip
    return out


def gated(x: Tensor, gate_up: Product) -> Tensor:
    """silu(gate) * value of the MLP's first products."""
    rows, width = len(x), gate_up.weight.shape[0] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    layer_kernels.gate[(rows, -(-width // 1024))](gate_up(x), out, width, BLOCK=1024, num_warps=4)
    return out
