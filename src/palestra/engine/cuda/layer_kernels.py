"""Triton kernels of a layer around attention: norm, gate, RoPE."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(X, W, OUT, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ONE_PLUS: tl.constexpr):
    """OUT = X / sqrt(mean(X²) + eps) * W, rounded as the Hugging Face modules round; grid (rows,).

    ONE_PLUS: the factor is 1 + W.
    """
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH
    x = tl.load(X + row + at, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row + at, _weighted(normed, w, OUT.dtype.element_ty, ONE_PLUS).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _weighted(normed, w, E: tl.constexpr, ONE_PLUS: tl.constexpr):
    """A normed vector times the norm's weight; with ONE_PLUS times 1 + weight, and rounded once instead of twice."""
    return normed * (1.0 + w) if ONE_PLUS else normed.to(E).to(tl.float32) * w


@triton.jit
def gate(X, OUT, width, BLOCK: tl.constexpr):
    """OUT [rows, width] = silu(the first half of X) * its second half; grid (rows, blocks)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(X + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(X + (row * 2 + 1) * width + at, mask=inside, other=0.0).to(tl.float32)
    silu = (x * tl.sigmoid(x)).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * width + at, (silu * value).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def apply_rope(
    X, row, inside, d, W, COS, SIN, position, eps,
    D: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Heads [R, DP] from X + row [R, 1] on, with NORM the RMS norm of weight W (ONE_PLUS: 1 + W), their first ROPE
    columns rotated to their position, which is one number for all or [R, 1].

    Rounded where the Hugging Face modules round, so that sampler and learner differ as little as can be.
    """
    x = tl.load(X + row + d[None, :], mask=inside, other=0.0)
    if NORM or ROPE:
        E: tl.constexpr = X.dtype.element_ty
        HALF: tl.constexpr = ROPE // 2
        rotated = d < ROPE
        other_d = tl.where(rotated, tl.where(d < HALF, d + HALF, d - HALF), d)
        other = tl.load(X + row + other_d[None, :], mask=inside, other=0.0).to(tl.float32)
        y = x.to(tl.float32)
        in_d = d < D
        if NORM:
            r = tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
            w = tl.load(W + d, mask=in_d, other=0.0).to(tl.float32)
            other_w = tl.load(W + other_d, mask=in_d, other=0.0).to(tl.float32)
            y = _weighted(y * r, w[None, :], E, ONE_PLUS).to(E).to(tl.float32)
            other = _weighted(other * r, other_w[None, :], E, ONE_PLUS).to(E).to(tl.float32)
        if ROPE:
            at = position * ROPE + d[None, :]
            cos = tl.load(COS + at, mask=rotated[None, :], other=1.0).to(tl.float32)
            sin = tl.load(SIN + at, mask=rotated[None, :], other=0.0).to(tl.float32)
            sign = tl.where(d < HALF, -1.0, 1.0)
            y = (y * cos).to(E).to(tl.float32) + (other * (sign[None, :] * sin)).to(E).to(tl.float32)
        x = y.to(E)
    return x


@triton.jit
def rope_and_store(
    QKV, Q_OUT, K, V, PAGES, POSITIONS, COS, SIN, Q_NORM, K_NORM, eps, qkv_stride,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """A token's queries with RoPE into Q_OUT [N, H, D], its keys and values into their page; grid (tokens, H + KV).

    A token whose page is -1 is padding: its KV goes nowhere.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(POSITIONS + token)
    one, d = tl.arange(0, 1), tl.arange(0, DP)
    inside = (one[:, None] == 0) & (d[None, :] < D)
    row = token * qkv_stride + head * D + one[:, None]
    if head < H:
        q = apply_rope(QKV, row, inside, d, Q_NORM, COS, SIN, position, eps, D, NORM, ONE_PLUS, ROPE)
        tl.store(Q_OUT + (token * H + head) * D + one[:, None] + d[None, :], q, mask=inside)
    else:
        k = apply_rope(QKV, row, inside, d, K_NORM, COS, SIN, position, eps, D, NORM, ONE_PLUS, ROPE)
        v = tl.load(QKV + row + KV * D + d[None, :], mask=inside, other=0.0)
        page = tl.load(PAGES + token).to(tl.int64)
        at = ((page * KV + head - H) * PAGE + position % PAGE) * D + one[:, None] + d[None, :]
        if page >= 0:
            tl.store(K + at, k, mask=inside)
            tl.store(V + at, v, mask=inside)
