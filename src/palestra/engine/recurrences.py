"""Recurrences of gated delta nets and Mamba 2 over chunks of tokens, with their gradients written out.

They stand in for functions of transformers' modeling files where no package with kernels for them is installed
(flash-linear-attention, mamba-ssm) or where it cannot train.

For the tokens of one chunk, with c_t the cumulative log decay, D_ij = exp(c_i - c_j) for j <= i, and S the state
before the chunk, the gated delta rule is

    A = β k kᵀ ⊙ D below the diagonal,  T = (I + A)⁻¹,  P = q kᵀ ⊙ D
    U = T (β v),  W = T (β eᶜ k),  V' = U - W S
    out = eᶜ q S + P V',   S' = e^(c_last) S + (e^(c_last - c) k)ᵀ V'

It makes half as many passes over memory as transformers' own, launches half as many kernels, and solves one system
instead of four. The scan of Mamba 2 is

    out = (q kᵀ ⊙ D) v + e^c ⊙ (q S),   S' = e^(c_last) S + kᵀ (e^(c_last - c) ⊙ v)

Transformers' own writes products out for every pair of tokens, head and number of the state before it adds them up:
gigabytes for a row of a real model. Here they are products of matrices; heads that share B and C read one copy.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.core.machine import installed_version

CHUNK, SHORTEST_CHUNK = 64, 16  # tokens
EPSILON = 1e-6  # of the norm of queries and keys
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

    def from_here(x: Tensor, dim: int) -> Tensor:  # at each place, the sum from there to the end
        return x.flip(dim).cumsum(dim).flip(dim)

    total = from_here(by_between, -2).tril_(-1).sum(-1) + from_here(by_grown, -1) + by_whole[..., None]
    total[..., 1:] += by_left.cumsum(-1)[..., :-1]
    return total


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
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        query, key, value, g, beta, state, chunk_size, normalises = inputs
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
    out, state = _MambaScan.apply(C, B, values.unflatten(2, (-1, shared)), decays.unflatten(2, (-1, shared)), state)
    out = out.flatten(2, 3)
    if D is not None:
        out = torch.addcmul(out, D[:, None].to(dtype), hidden_states.to(dtype))
    return (out, state.movedim(2, -1).flatten(1, 2)) if return_final_states else out


class _MambaScan(torch.autograd.Function):
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


class StandIn(NamedTuple):
    name: str  # of the function in modeling files
    ours: Callable[..., Any]
    package: str  # whose kernels transformers calls if it is installed


STAND_INS = (
    StandIn("torch_chunk_gated_delta_rule", chunk_gated_delta_rule, "fla"),
    StandIn("mamba2_chunk_scan", mamba_chunk_scan, "mamba_ssm"),
)
Place = tuple[Any, StandIn]  # a modeling file, and what takes the place of one of its functions


def stand_ins_for(layers: Iterable[nn.Module]) -> list[Place]:
    """Where functions of ours are called instead of transformers' own, for these layers."""
    files = {type(layer).__module__: sys.modules[type(layer).__module__] for layer in layers}
    return [
        (file, each)
        for file in files.values()
        for each in STAND_INS
        if hasattr(file, each.name) and (find_spec(each.package) is None or (each.package == "fla" and _fla_refuses()))
    ]


def _fla_refuses() -> bool:
    """Whether flash-linear-attention's backward pass raises an error: Triton compiles it wrongly for Hopper GPUs."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = tuple(int(number) for number in re.findall(r"\d+", installed_version("triton") or "")[:3])
    return (3, 4) <= version < (3, 7, 1)


_lock = Lock()
_users: Counter[Place] = Counter()  # how many passes are inside of `calls`: there are several threads
_theirs: dict[Place, Any] = {}


@contextmanager
def calls(places: Iterable[Place]) -> Iterator[None]:
    """Let these files call the functions that stand in."""
    with _lock:
        for file, stand_in in places:
            if not _users[file, stand_in]:
                _theirs[file, stand_in] = getattr(file, stand_in.name)
                setattr(file, stand_in.name, stand_in.ours)
            _users[file, stand_in] += 1
    try:
        yield
    finally:
        with _lock:
            for file, stand_in in places:
                _users[file, stand_in] -= 1
                if not _users[file, stand_in]:
                    setattr(file, stand_in.name, _theirs.pop((file, stand_in)))
