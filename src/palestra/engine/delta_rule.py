"""The gated delta rule over chunks of tokens, with its gradient written out.

A stand-in for transformers' `torch_chunk_gated_delta_rule`, where flash-linear-attention is missing or cannot train.
It makes half as many passes over memory, launches half as many kernels, and solves one system instead of four.

For the tokens of one chunk, with c_t the cumulative log decay, D_ij = exp(c_i - c_j) for j <= i, and S the state
before the chunk:

    A = β k kᵀ ⊙ D below the diagonal,  T = (I + A)⁻¹,  P = q kᵀ ⊙ D
    U = T (β v),  W = T (β eᶜ k),  V' = U - W S
    out = eᶜ q S + P V',   S' = e^(c_last) S + (e^(c_last - c) k)ᵀ V'
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from palestra.engine.chunks import (
    CHUNK,
    as_chunks,
    as_tokens,
    chunk_for,
    decays_between,
    log_decay_gradient,
    without_padding,
)

EPSILON = 1e-6  # of the norm of queries and keys


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = CHUNK,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """([B, L, H, V] output, [B, H, K, V] state after the last token, if asked for), as transformers' function.

    query and key [B, L, H, K], value [B, L, H, V], log decay g and beta [B, L, H], initial_state [B, H, K, V].
    Computes in float32 or more.
    """
    dtype = torch.promote_types(torch.float32, query.dtype)
    if initial_state is None:
        initial_state = query.new_zeros(query.shape[0], query.shape[2], key.shape[3], value.shape[3], dtype=dtype)
    inputs = query, key, value, without_padding(g), without_padding(beta), initial_state.to(dtype)
    out, state = _DeltaRule.apply(*inputs, chunk_size, use_qk_l2norm_in_kernel)
    return out, state if output_final_state else None


class _DeltaRule(torch.autograd.Function):
    """Tensors inside are [B · H, chunks, tokens of a chunk, ...], states [B · H, K, V]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        chunk_size: int,
        normalises: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, length, heads, _ = query.shape
        chunk = chunk_for(length, chunk_size)
        q, k, v, log_decay, b = (as_chunks(x, chunk, state.dtype) for x in (query, key, value, g, beta))
        scale = query.shape[-1] ** -0.5
        q_norm = k_norm = None
        if normalises:
            q, q_norm = _normalised(q)
            k, k_norm = _normalised(k)
        q.mul_(scale)

        c = log_decay.cumsum(-1)  # [BH, N, C]
        decay = decays_between(c)
        b, grown, left = b[..., None], c.exp()[..., None], (c[..., -1:] - c).exp()[..., None]
        alike = (k @ k.mT).mul_(decay).tril_(-1)  # A without β
        p = (q @ k.mT).mul_(decay)
        eye = torch.eye(chunk, dtype=p.dtype, device=p.device).expand_as(p)
        inverse = torch.linalg.solve_triangular(b * alike, eye, upper=False, unitriangular=True)
        width = v.shape[-1]
        uw = inverse @ torch.cat([b * v, (b * grown) * k], -1)  # [BH, N, C, V + K]
        u, w = uw[..., :width], uw[..., width:]
        # Both read the state before the chunk: one product.
        readers = torch.cat([grown * q, w], -2)  # [BH, N, 2C, K]
        writers = left * k

        states = q.new_empty(*q.shape[:2], k.shape[-1], width)  # before each chunk
        # Above, what the chunk's queries read of the state; below, the new values V'.
        read = q.new_empty(*readers.shape[:-1], width)
        now = state.reshape(-1, k.shape[-1], width)
        whole = grown[..., -1, :, None]  # [BH, N, 1, 1] decay of a whole chunk
        for i in range(q.shape[1]):
            states[:, i] = now
            torch.bmm(readers[:, i], now, out=read[:, i])
            torch.sub(u[:, i], read[:, i, chunk:], out=read[:, i, chunk:])
            now = torch.baddbmm(whole[:, i] * now, writers[:, i].mT, read[:, i, chunk:])
        new = read[..., chunk:, :]
        out = read[..., :chunk, :] + p @ new

        saved = q, k, v, b, c, decay, alike, p, inverse, uw, readers, states, read, q_norm, k_norm, beta, g
        ctx.save_for_backward(*saved)
        ctx.shape, ctx.dtypes, ctx.scale = (rows, length, heads), (query.dtype, key.dtype, value.dtype), scale
        return as_tokens(out, ctx.shape, query.dtype), now.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, b, c, decay, alike, p, inverse, uw, readers, states, read, q_norm, k_norm, beta, g = ctx.saved_tensors
        chunk, width = q.shape[-2], v.shape[-1]
        d_out = as_chunks(grads[0], chunk, q.dtype)
        grown, left, last = c.exp()[..., None], (c[..., -1:] - c).exp()[..., None], c[..., -1].exp()[..., None, None]
        new = read[..., chunk:, :]
        writers = left * k

        # Above, the gradient of the output; below, that of V', negative as that of what W reads.
        d_read = torch.cat([d_out, (p.mT @ d_out).neg_()], -2)
        d_states = torch.empty_like(states)  # of the states after each chunk
        d_now = grads[1].to(q.dtype).reshape(-1, *states.shape[-2:])
        for i in reversed(range(q.shape[1])):
            d_states[:, i] = d_now
            d_read[:, i, chunk:].baddbmm_(writers[:, i], d_now, alpha=-1.0)
            d_now = torch.baddbmm(last[:, i] * d_now, readers[:, i].mT, d_read[:, i])
        d_initial = d_now.view(ctx.shape[0], ctx.shape[2], *d_now.shape[1:])

        d_readers = d_read @ states.mT
        d_grown_q, d_w = d_readers[..., :chunk, :], d_readers[..., chunk:, :]
        d_writers = new @ d_states.mT
        d_whole = (states * d_states).sum((-2, -1)) * last[..., 0, 0]  # [BH, N], of the log decay of a whole chunk
        d_uw = torch.cat([d_read[..., chunk:, :].neg(), d_w], -1)
        d_vk = inverse.mT @ d_uw  # of β v and of β eᶜ k
        d_bv, d_bk = d_vk[..., :width], d_vk[..., width:]
        d_a = (d_vk @ uw.mT).tril_(-1).neg_()
        d_p = d_out @ new.mT

        by_alike = d_a * alike
        by_decay = (b * by_alike).addcmul_(d_p, p)  # [BH, N, C, C]
        read_by_k = (d_bk * k).sum(-1, keepdim=True) * grown  # of β, through β eᶜ k
        by_grown = (d_grown_q * q).sum(-1, keepdim=True).mul_(grown).addcmul_(read_by_k, b)[..., 0]
        by_left = (d_writers * writers).sum(-1)
        d_g = log_decay_gradient(by_decay, by_grown, by_left, d_whole)

        d_b = (by_alike.sum(-1, keepdim=True) + (d_bv * v).sum(-1, keepdim=True) + read_by_k)[..., 0]
        d_a.mul_(decay).mul_(b)
        d_p.mul_(decay)
        d_q = (d_p @ k).addcmul_(d_grown_q, grown)
        d_k = (d_a + d_a.mT) @ k + d_p.mT @ q
        d_k.addcmul_(d_writers, left).addcmul_(d_bk, b * grown)
        d_v = b * d_bv
        d_q.mul_(ctx.scale)
        if q_norm is not None:
            d_q = _norm_gradient(d_q, q / ctx.scale, q_norm)
            d_k = _norm_gradient(d_k, k, k_norm)
        columns = zip((d_q, d_k, d_v, d_g, d_b), (*ctx.dtypes, g.dtype, beta.dtype), strict=True)
        return *(as_tokens(x, ctx.shape, dtype) for x, dtype in columns), d_initial, None, None


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x divided by its length, in place, and one over the length."""
    inverse = x.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    return x.mul_(inverse), inverse


def _norm_gradient(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    along = (grad * normed).sum(-1, keepdim=True)
    return grad.addcmul_(normed, along, value=-1.0).mul_(inverse)
