"""A decoder's layers as their weights, laid out for few kernels: linear layers with one input are one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.engine.cuda import exact
from palestra.engine.cuda.paged_ops import RopeAndNorm
from palestra.engine.supported import FusedAdapter, adapted_product, base_linear, norm_epsilon, sliding_window


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


def layer_of(index: int, module: Any, cos: Tensor, sin: Tensor, exact: bool = False) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    has_rope = getattr(attention, "use_rope", True)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        index=index,
        attention_norm=module.input_layernorm,
        qkv=Product.of(attention.q_proj, attention.k_proj, attention.v_proj, exact=exact),
        out=Product.of(attention.o_proj, exact=exact),
        mlp_norm=module.post_attention_layernorm,
        gate_up=Product.of(mlp.gate_proj, mlp.up_proj, exact=exact),
        down=Product.of(mlp.down_proj, exact=exact),
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
