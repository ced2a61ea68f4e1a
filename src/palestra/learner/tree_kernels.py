"""A Triton kernel of tree attention: its two halves put together in one pass."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit(do_not_specialize=["tokens", "lse_stride", "half_lse_stride"])  # which differ in every micro-batch
def _merge(
    OUT, LSE, HALF, HALF_LSE, tokens, size, out_stride, lse_stride, half_stride, half_lse_stride,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, heads)."""
    head = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    own = tl.load(LSE + head * lse_stride + token, mask=inside, other=0.0)
    other = tl.load(HALF_LSE + head * half_lse_stride + token, mask=inside, other=0.0)
    top = tl.maximum(own, other)
    both = top + tl.log(tl.exp(own - top) + tl.exp(other - top))
    tl.debug_barrier()  # every warp reads LSE for itself: none may come after the one that overwrites it
    tl.store(LSE + head * lse_stride + token, both, mask=inside)
    column = tl.arange(0, SIZE)
    row = token.to(tl.int64)[:, None]
    at = head * size + column[None, :]
    mask = inside[:, None] & (column < size)[None, :]
    a = tl.load(OUT + row * out_stride + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(HALF + row * half_stride + at, mask=mask, other=0.0).to(tl.float32)
    merged = a * tl.exp(own - both)[:, None] + b * tl.exp(other - both)[:, None]
    tl.store(OUT + row * out_stride + at, merged.to(OUT.dtype.element_ty), mask=mask)


def merge(out: Tensor, lse: Tensor, half: Tensor, half_lse: Tensor) -> None:
    """As `tree_attention_cuda.merge`; each token's heads lie together, and each head's log-sum-exps."""
    tokens, heads, size = out.shape
    _merge[(triton.cdiv(tokens, ROWS), heads)](
        out, lse, half, half_lse, tokens, size, out.stride(0), lse.stride(0), half.stride(0),
        half_lse.stride(0), ROWS=ROWS, SIZE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
