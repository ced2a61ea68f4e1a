"""Triton kernels of a layer around attention: norm, gate, RoPE; at few rows also its matrix products, fused with these.

A norm needs the sum of a row's squares before it can scale the row. So the kernels for few rows that write the hidden
state also write it times the norm's weight, with the sum of squares of their own columns; the product that follows
scales its result. With OVERLAPS a kernel starts while the previous one still runs (programmatic dependent launch): it
prefetches its weights, which no kernel changes, and then waits for the previous kernel's output.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(64)  # 16-bit numbers in a line of the L2 cache


@triton.jit
def wait():
    """Wait until the previous kernel has ended and its writes are visible; then let the next kernel start."""
    gdc_wait()
    gdc_launch_dependents()


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
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr, ROPE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A token's queries with RoPE into Q_OUT [N, H, D], its keys and values into their page; grid (tokens, H + KV).

    A token whose page is -1 is padding: its KV goes nowhere.
    """
    if OVERLAPS:
        wait()
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


# mypy: disallow-untyped-defs=False


@triton.jit
def _ask_for(W, n, first, depth, SPAN: tl.constexpr):
    """Bring columns first..first + SPAN of the weights' rows n into the L2 cache."""
    LINES: tl.constexpr = SPAN // LINE
    AT_ONCE: tl.constexpr = 16 if LINES % 16 == 0 else (4 if LINES % 4 == 0 else 1)
    for i in tl.static_range(0, LINES, AT_ONCE):
        k = first + (i + tl.arange(0, AT_ONCE)) * LINE
        at = W + n[:, None].to(tl.int64) * depth + k[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _row_scale(SQUARES, m, rows, depth, eps, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of rows m [BM], from the sums of their parts."""
    part = tl.arange(0, PADDED)
    inside = (m < rows)[:, None] & (part < PARTS)[None, :]
    squares = tl.load(SQUARES + m[:, None] * PARTS + part[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / depth + eps)[:, None]


@triton.jit
def embed(
    IDS, TABLE, NORM, X, Y, SQUARES,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """X = the tokens' rows of TABLE, Y = X * NORM, and each row's sum of squares as its first part; grid (rows,)."""
    row, at, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PADDED)
    inside = at < WIDTH
    x = tl.load(TABLE + tl.load(IDS + row).to(tl.int64) * WIDTH + at, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    norm = tl.load(NORM + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(X + row * WIDTH + at, x, mask=inside)
    tl.store(Y + row * WIDTH + at, (wide * norm).to(Y.dtype.element_ty), mask=inside)
    tl.store(SQUARES + row * PARTS + part, tl.where(part == 0, tl.sum(wide * wide, 0), 0.0), mask=part < PARTS)


@triton.jit
def normed_product(
    Y, SQUARES, W, OUT, rows, width, eps,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
    PADDED: tl.constexpr, GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """OUT [rows, width] = normed @ W.T; GATED: silu(normed @ gates) * (normed @ values), W [2 * width, DEPTH].

    Grid (width / BN, rows / BM); BN divides the width and BK the depth.
    """
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    if OVERLAPS:
        _ask_for(W, n, 0, DEPTH, DEPTH)
        if GATED:
            _ask_for(W, n + width, 0, DEPTH, DEPTH)
        wait()
    real = (m < rows)[:, None]
    y_at = Y + m[:, None].to(tl.int64) * DEPTH + k[None, :]
    w_at = W + n[None, :].to(tl.int64) * DEPTH + k[:, None]
    value_at = w_at + width.to(tl.int64) * DEPTH
    out = tl.zeros((BM, BN), tl.float32)
    value = tl.zeros((BM, BN), tl.float32)
    for i in range(0, DEPTH, BK):
        y = tl.load(y_at + i, mask=real, other=0.0)
        out = tl.dot(y, tl.load(w_at + i), out)
        if GATED:
            value = tl.dot(y, tl.load(value_at + i), value)
    scale = _row_scale(SQUARES, m, rows, DEPTH, eps, PARTS, PADDED)
    out *= scale
    if GATED:
        out = out * tl.sigmoid(out) * (value * scale)
    tl.store(OUT + m[:, None].to(tl.int64) * width + n[None, :], out.to(OUT.dtype.element_ty), mask=real)


@triton.jit
def added_product(
    A, W, X, NORM, Y, SQUARES, SUMS, ARRIVED, rows, width,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """X [rows, width] += A @ W.T; Y = X * NORM; SQUARES [rows, width / BN]: the sum of each block's squares.

    Grid (width / BN, rows / BM, SPLITS): each split sums up its share of the depth, and the one that comes last adds
    all shares, always in the same order. ARRIVED counts them, 0 before and after.
    """
    block, m_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = m_block * BM + tl.arange(0, BM)
    n, k = block * BN + tl.arange(0, BN), tl.arange(0, BK)
    SPAN: tl.constexpr = DEPTH // SPLITS
    first = split * SPAN
    if OVERLAPS:
        _ask_for(W, n, first, DEPTH, SPAN)
        wait()
    real = (m < rows)[:, None]
    a_at = A + m[:, None].to(tl.int64) * DEPTH + first + k[None, :]
    w_at = W + n[None, :].to(tl.int64) * DEPTH + first + k[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for i in range(0, SPAN, BK):
        total = tl.dot(tl.load(a_at + i, mask=real, other=0.0), tl.load(w_at + i), total)
    last = True
    if SPLITS > 1:
        tile = m_block * tl.num_programs(0) + block
        here = SUMS + tile * SPLITS * BM * BN + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(here + split * BM * BN, total)
        tl.debug_barrier()  # all threads have written before one of them says so
        last = tl.atomic_add(ARRIVED + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(ARRIVED + tile, 0)
            total = tl.zeros((BM, BN), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(here + part * BM * BN, cache_modifier=".cg")  # not from a cache that others do not see
    if last:
        at = m[:, None].to(tl.int64) * width + n[None, :]
        x = (tl.load(X + at, mask=real, other=0.0).to(tl.float32) + total).to(X.dtype.element_ty)
        tl.store(X + at, x, mask=real)
        wide = x.to(tl.float32)
        norm = tl.load(NORM + n).to(tl.float32)
        tl.store(Y + at, (wide * norm[None, :]).to(Y.dtype.element_ty), mask=real)
        tl.store(SQUARES + m * (width // BN) + block, tl.sum(wide * wide, 1), mask=m < rows)
