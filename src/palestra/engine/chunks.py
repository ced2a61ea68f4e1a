"""Tokens in chunks, for recurrences that are computed chunk by chunk (`delta_rule`, `mamba_scan`)."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK, SHORTEST_CHUNK = 64, 16  # tokens


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


def from_here(x: Tensor, dim: int) -> Tensor:
    """At each place, the sum from there to the end."""
    return x.flip(dim).cumsum(dim).flip(dim)
