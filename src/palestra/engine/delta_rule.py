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

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from palestra.core.machine import installed_version

CHUNK, SHORTEST_CHUNK = 64, 16  # tokens
EPSILON = 1e-6  # of the norm of queries and keys
REPLACED = "torch_chunk_gated_delta_rule"  # in transformers' modeling files


def modeling_files(layers: Iterable[nn.Module]) -> list[Any]:
    """The modules of transformers whose delta rule `chunk_gated_delta_rule` stands in for."""
    if find_spec("fla") is not None and not _fla_refuses():  # transformers calls its kernels
        return []
    files = {type(layer).__module__: sys.modules[type(layer).__module__] for layer in layers}
    return [file for file in files.values() if hasattr(file, REPLACED)]


def _fla_refuses() -> bool:
    """Whether flash-linear-attention's backward pass raises an error: Triton compiles it wrongly for Hopper GPUs."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = tuple(int(number) for number in re.findall(r"\d+", installed_version("triton") or "")[:3])
    return (3, 4) <= version < (3, 7, 1)


_lock = Lock()
_users: Counter[Any] = Counter()  # how many passes are inside of `replaced_in`, by file: there are several threads
_theirs: dict[Any, Any] = {}


@contextmanager
def replaced_in(files: Iterable[Any]) -> Iterator[None]:
    """Let these files call `chunk_gated_delta_rule`."""
    with _lock:
        for file in files:
            if not _users[file]:
                _theirs[file] = getattr(file, REPLACED)
                setattr(file, REPLACED, chunk_gated_delta_rule)
            _users[file] += 1
    try:
        yield
    finally:
        with _lock:
            for file in files:
                _users[file] -= 1
                if not _users[file]:
                    setattr(file, REPLACED, _theirs.pop(file))


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
    inputs = query, key, value, g, beta, initial_state.to(dtype)
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
        chunk = min(chunk_size, max(SHORTEST_CHUNK, -(-length // SHORTEST_CHUNK) * SHORTEST_CHUNK))
        q, k, v, log_decay, b = (_chunks(x, chunk, state.dtype) for x in (query, key, value, g, beta))
        scale = query.shape[-1] ** -0.5
        q_norm = k_norm = None
        if normalises:
            q, q_norm = _normalised(q)
            k, k_norm = _normalised(k)
        q.mul_(scale)

        c = log_decay.cumsum(-1)  # [BH, N, C]
        decay = (c[..., :, None] - c[..., None, :]).tril_().exp_().tril_()
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
        return _tokens(out, ctx.shape, query.dtype), now.view_as(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, b, c, decay, alike, p, inverse, uw, readers, states, read, q_norm, k_norm, beta, g = ctx.saved_tensors
        chunk, width = q.shape[-2], v.shape[-1]
        d_out = _chunks(grads[0], chunk, q.dtype)
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

        # The log decay g_t is in D_ij for j < t <= i, in e^(c_i) for t <= i, and in e^(c_last - c_i) for i < t. Its
        # gradient adds up just these: the gradient by c has differences of larger sums, which lose digits.
        by_alike = d_a * alike
        by_decay = (b * by_alike).addcmul_(d_p, p)  # [BH, N, C, C]
        read_by_k = (d_bk * k).sum(-1, keepdim=True) * grown  # of β, through β eᶜ k
        by_grown = (d_grown_q * q).sum(-1, keepdim=True).mul_(grown).addcmul_(read_by_k, b)[..., 0]
        by_left = (d_writers * writers).sum(-1)
        d_g = _from_here(by_decay, -2).tril_(-1).sum(-1) + _from_here(by_grown, -1) + d_whole[..., None]
        d_g[..., 1:] += by_left.cumsum(-1)[..., :-1]

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
        return *(_tokens(x, ctx.shape, dtype) for x, dtype in columns), d_initial, None, None


def _chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """[B, L, H, ...] -> a copy [B · H, chunks, chunk, ...], padded with zeros, which change no state."""
    rows, length, heads, *size = x.shape
    count = -(-length // chunk)
    out = x.new_empty(rows, heads, count * chunk, *size, dtype=dtype)
    out[:, :, :length] = x.transpose(1, 2)
    out[:, :, length:] = 0.0
    return out.view(rows * heads, count, chunk, *size)


def _tokens(x: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """The reverse: [B, L, H, ...], contiguous."""
    rows, length, heads = shape
    whole = x.reshape(rows, heads, -1, *x.shape[3:])[:, :, :length].transpose(1, 2)
    return whole.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _from_here(x: Tensor, dim: int) -> Tensor:
    """At each place, the sum from there to the end."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x divided by its length, in place, and one over the length."""
    inverse = x.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    return x.mul_(inverse), inverse


def _norm_gradient(grad: Tensor, normed: Tensor, inverse: Tensor) -> Tensor:
    along = (grad * normed).sum(-1, keepdim=True)
    return grad.addcmul_(normed, along, value=-1.0).mul_(inverse)
