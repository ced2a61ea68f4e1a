"""The scan of Mamba 2 over chunks of tokens, with its gradient written out.

A stand-in for transformers' `mamba2_chunk_scan` where mamba-ssm is not installed. That one writes products out for
every pair of tokens, head and number of the state before it adds them up, gigabytes for a row of a real model. Here
they are products of matrices, and heads that share keys and queries (B and C) read one copy of them.

For the tokens of one chunk, with c_t the cumulative log decay of a head, D_ij = exp(c_i - c_j) for j <= i, and S the
head's state before the chunk:

    out = (q kᵀ ⊙ D) v + e^c ⊙ (q S),   S' = e^(c_last) S + kᵀ (e^(c_last - c) ⊙ v)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.engine.chunks import (
    as_chunks,
    as_tokens,
    chunk_for,
    decays_between,
    log_decay_gradient,
    without_padding,
)


def mamba_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """[b, L, H, P] output, and the state [b, H, P, N] after the last token if asked for, as transformers' function.

    hidden_states [b, L, H, P], dt [b, L, H], A and D [H], B and C [b, L, groups, N]. Computes in float32 or more, and
    chooses the size of chunks, on which no result depends.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    rows, _length, heads, _size = hidden_states.shape
    shared = heads // B.shape[2]  # heads of a group
    dtype = torch.promote_types(torch.float32, hidden_states.dtype)
    dt = without_padding(dt.clamp(*dt_limit)).to(dtype)
    values = hidden_states.to(dtype) * dt[..., None]
    decays = A.to(dtype) * dt
    if initial_states is None:
        initial_states = values.new_zeros(rows, heads, values.shape[-1], B.shape[-1])
    state = initial_states.to(dtype).unflatten(1, (-1, shared)).movedim(-1, 2)  # [b, groups, N, shared, P]
    out, state = _Scan.apply(C, B, values.unflatten(2, (-1, shared)), decays.unflatten(2, (-1, shared)), state)
    out = out.flatten(2, 3)
    if D is not None:
        out = torch.addcmul(out, D[:, None].to(dtype), hidden_states.to(dtype))
    return (out, state.movedim(2, -1).flatten(1, 2)) if return_final_states else out


class _Scan(torch.autograd.Function):
    """Tensors inside: q and k [G, chunks, tokens of a chunk, K] with G rows and groups together, v [G, chunks, tokens,
    R, V] of the R heads of a group, log decays [G, chunks, tokens, R], states [G, K, R, V]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rows, length, groups, _ = query.shape
        chunk = chunk_for(length)
        q, k, v, log_decay = (as_chunks(x, chunk, value.dtype) for x in (query, key, value, g))
        c = log_decay.cumsum(2)
        grown, left = c.exp(), (c[:, :, -1:] - c).exp()
        decay = decays_between(c.movedim(-1, 2))  # [G, N, R, C, C]
        alike = q @ k.mT  # [G, N, C, C]
        own = (decay * alike[:, :, None]) @ v.movedim(3, 2)
        written = (k.mT @ (left[..., None] * v).flatten(3)).unflatten(-1, v.shape[3:])

        states = torch.empty_like(written)  # before each chunk
        now, whole = state.flatten(0, 1), grown[:, :, -1, :, None]  # whole: the decay of a whole chunk
        for i in range(q.shape[1]):
            states[:, i] = now
            now = torch.addcmul(written[:, i], whole[:, i, None], now)
        read = (q @ states.flatten(3)).unflatten(-1, v.shape[3:])
        out = torch.addcmul(own.movedim(2, 3), grown[..., None], read)

        ctx.save_for_backward(q, k, v, c, decay, alike, states, read)
        ctx.shape, ctx.dtypes = (rows, length, groups), (query.dtype, key.dtype, value.dtype, g.dtype)
        return as_tokens(out, ctx.shape, value.dtype), now.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, c, decay, alike, states, read = ctx.saved_tensors
        d_out = as_chunks(grads[0], q.shape[2], q.dtype)
        grown, left = c.exp(), (c[:, :, -1:] - c).exp()
        whole = grown[:, :, -1, :, None]
        of_heads = d_out.movedim(3, 2)  # [G, N, R, C, V]

        p = decay * alike[:, :, None]
        d_p = of_heads @ v.movedim(3, 2).mT
        d_v = (p.mT @ of_heads).movedim(2, 3)
        d_read = (grown[..., None] * d_out).flatten(3)
        d_before = (q.mT @ d_read).unflatten(-1, v.shape[3:])  # of the states before each chunk, by its output

        d_states = torch.empty_like(states)  # of the states after each chunk
        d_now = grads[1].to(q.dtype).flatten(0, 1)
        for i in reversed(range(q.shape[1])):
            d_states[:, i] = d_now
            d_now = torch.addcmul(d_before[:, i], whole[:, i, None], d_now)
        d_initial = d_now.view_as(grads[1])

        d_written = (k @ d_states.flatten(3)).unflatten(-1, v.shape[3:])
        d_v = torch.addcmul(d_v, left[..., None], d_written)
        by_grown = (d_out * read).sum(-1).mul_(grown).movedim(2, 3)
        by_left = (d_written * v).sum(-1).mul_(left).movedim(2, 3)
        d_whole = (states * d_states).sum((2, 4)) * whole[..., 0]
        d_g = log_decay_gradient(d_p * p, by_grown, by_left, d_whole).movedim(2, 3)

        d_alike = d_p.mul_(decay).sum(2)
        d_q = d_read @ states.flatten(3).mT + d_alike @ k
        d_k = (left[..., None] * v).flatten(3) @ d_states.flatten(3).mT + d_alike.mT @ q
        columns = zip((d_q, d_k, d_v, d_g), ctx.dtypes, strict=True)
        return *(as_tokens(x, ctx.shape, dtype) for x, dtype in columns), d_initial
