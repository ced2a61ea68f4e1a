"""Tokens in chunks, for recurrences that are computed chunk by chunk (`delta_rule`, `mamba_scan`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

CHUNK, SHORTEST_CHUNK = 64, 16  # tokens
_REAL: ContextVar[Tensor | None] = ContextVar("real tokens", default=None)  # [B, L] of the rows being computed


@contextmanager
def padded_rows(lengths: Tensor | None, longest: int) -> Iterator[None]:
    """Inside, recurrences over rows of `longest` tokens see only the first `lengths` [B]; None: all."""
    real = None if lengths is None else torch.arange(longest, device=lengths.device) < lengths[:, None]
    token = _REAL.set(real)
    try:
        yield
    finally:
        _REAL.reset(token)


def without_padding(x: Tensor) -> Tensor:
    """[B, L, H] with zeros where rows are padded: a log decay or a step of 0 leaves the state as it is."""
    real = _REAL.get()
    return x if real is None else x.masked_fill(~real[..., None], 0.0)


def chunk_for(length: int, most: int = CHUNK) -> int:
    """The tokens of a chunk: fewer for short rows, in steps.

    >>> chunk_for(3), chunk_for(40), chunk_for(400)
    (16, 48, 64)
    """
    return min(most, max(SHORTEST_CHUNK, -(-length // SHORTEST_CHUNK) * SHORTEST_CHUNK))


def as_chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """[B, L, H, ...] -> a copy [B · H, chunks, chunk, ...], padded with zeros, which change no state."""
    rows, length, heads, *size = x.shape
    count = -(-length // chunk)
    out = x.new_empty(rows, heads, count * chunk, *size, dtype=dtype)
    out[:, :, :length] = x.transpose(1, 2)
    out[:, :, length:] = 0.0
    return out.view(rows * heads, count, chunk, *size)


def as_tokens(x: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The reverse: [B, L, H, ...], contiguous."""
    rows, length, heads = shape
    whole = x.reshape(rows, heads, -1, *x.shape[3:])[:, :, :length].transpose(1, 2)
    return whole.to(dtype, memory_format=torch.contiguous_format).contiguous()


def decays_between(c: Tensor) -> Tensor:
    """[..., C, C] exp(c_i - c_j) for j <= i, else 0, of cumulative log decays [..., C]."""
    return (c[..., :, None] - c[..., None, :]).tril_().exp_().tril_()


def log_decay_gradient(by_between: Tensor, by_grown: Tensor, by_left: Tensor, by_whole: Tensor) -> Tensor:
    """[..., C] the gradient of log decays g, by those of the logarithms of what they make.

    g_t is in D_ij for j < t <= i (`by_between`), in e^(c_i) for t <= i (`by_grown`), in e^(c_last - c_i) for i < t
    (`by_left`), and in the decay of a whole chunk (`by_whole`, [...]). This adds up just these: the gradient by c has
    differences of larger sums, which lose digits.
    """
    found = _from_here(by_between, -2).tril_(-1).sum(-1) + _from_here(by_grown, -1) + by_whole[..., None]
    found[..., 1:] += by_left.cumsum(-1)[..., :-1]
    return found


def _from_here(x: Tensor, dim: int) -> Tensor:
    """At each place, the sum from there to the end."""
    return x.flip(dim).cumsum(dim).flip(dim)
