"""Triton kernels of the CUDA path: norm, gate, RoPE, and attention over pages.

Layout of the page store: [pages, KV heads, page, dim], one layer at a time. All offsets into it are 64 bit.
"""

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


@triton.jit
def _capped(s, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)  # tanh
    return s


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    return _capped(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)


@triton.jit
def _add_values(acc, total, m, s, v, PRECISION: tl.constexpr):
    """One step of the running softmax: the weighted sum of the values so far, the sum of the weights, the maximum."""
    m_next = tl.maximum(m, tl.max(s, 1))
    w = tl.exp(s - m_next[:, None])
    shrink = tl.exp(m - m_next)
    acc = acc * shrink[:, None] + tl.dot(w.to(v.dtype), v, input_precision=PRECISION)
    return acc, total * shrink + tl.sum(w, 1), m_next


@triton.jit
def _store_part(PART, PART_ML, place, real, d, acc, total, m, D: tl.constexpr):
    """What one split found of each real query, for `combine_parts`."""
    tl.store(PART + place[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])
    tl.store(PART_ML + place * 2, m, mask=real)
    tl.store(PART_ML + place * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["splits", "parts"])
def decode_attention(
    Q, K_NEW, V_NEW, K, V, TABLES, LENS, SHARED, OUT, PART, PART_ML, COS, SIN, Q_NORM, K_NORM, SINK,
    q_stride, q_head, k_stride, v_stride, table_width, scale, softcap, window, eps, splits, parts,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    T: tl.constexpr, WHOLE: tl.constexpr, SHARES: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, PRECISION: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """One new token of each row: applies RoPE to its query and key, stores its KV and attends to the row's pages.

    Grid (rows, KV heads, splits), T keys at once, which divides a page. The last split owns the new token,
    whose KV starts its running softmax straight from registers. A row of length 0 is dead: it stores nothing
    and reads nothing. If it SHARES, its first SHARED tokens are read by `shared_attention`, in the parts behind its
    splits. WHOLE: the row is one part. SINK [H] is the score of a key without a value. The queries of a row are q_head
    apart.
    """
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(LENS + b)
    g, d, t = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, T)
    in_d = d < D
    rows = (g[:, None] < G) & in_d[None, :]
    past = tl.maximum(n - 1, 0)
    q_row, k_row = b * q_stride + (h * G + g[:, None]) * q_head, b * k_stride + h * D + tl.arange(0, 1)[:, None]
    q = apply_rope(Q, q_row, rows, d, Q_NORM, COS, SIN, past, eps, D, NORM, ONE_PLUS, ROPE)
    k_new = apply_rope(K_NEW, k_row, in_d[None, :], d, K_NORM, COS, SIN, past, eps, D, NORM, ONE_PLUS, ROPE)
    first_key = tl.maximum(n - window, 0) if WINDOW else 0
    if SHARES:
        first_key = tl.load(SHARED + b)
    first, end = first_key // T, tl.cdiv(past, T)
    span = tl.cdiv(tl.maximum(end - first, 0), splits)
    low = first + split * span
    high = tl.minimum(low + span, end)
    v_new = tl.load(V_NEW + b * v_stride + h * D + d, mask=in_d, other=0.0)
    m = tl.full((GP,), -float("inf"), tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    if split == splits - 1:
        m = _capped(tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale, softcap, SOFTCAP)
        total = tl.full((GP,), 1.0, tl.float32)
        acc += v_new.to(tl.float32)[None, :]
        if SINKS:
            sink = tl.load(SINK + h * G + g, mask=g < G, other=-float("inf")).to(tl.float32)
            m_sink = tl.maximum(m, sink)
            acc = acc * tl.exp(m - m_sink)[:, None]
            total = tl.exp(m - m_sink) + tl.exp(sink - m_sink)
            m = m_sink
        if n > 0:
            page = tl.load(TABLES + b * table_width + past // PAGE).to(tl.int64)
            at = ((page * KV + h) * PAGE + past % PAGE) * D + d
            tl.store(K + at[None, :], k_new, mask=in_d[None, :])
            tl.store(V + at, v_new, mask=in_d)
    for i in range(low, high):
        page = tl.load(TABLES + b * table_width + i * T // PAGE).to(tl.int64)
        at = ((page * KV + h) * PAGE + i * T % PAGE + t[:, None]) * D + d[None, :]
        key = i * T + t
        seen = (key < past) & (key >= first_key)
        k = tl.load(K + at, mask=seen[:, None] & in_d[None, :], other=0.0)
        v = tl.load(V + at, mask=seen[:, None] & in_d[None, :], other=0.0)
        s = tl.where(seen[None, :], _scores(q, k, scale, softcap, SOFTCAP, PRECISION), -float("inf"))
        acc, total, m = _add_values(acc, total, m, s, v, PRECISION)
    head = (b * KV + h) * G + g
    if WHOLE:
        tl.store(OUT + head[:, None] * D + d[None, :], (acc / total[:, None]).to(OUT.dtype.element_ty), mask=rows)
    else:
        place = head * parts + split
        _store_part(PART, PART_ML, place, g < G, d, acc, total, m, D)


@triton.jit(do_not_specialize=["splits", "parts"])
def shared_attention(
    Q, K, V, TABLES, LENS, SHARED, BLOCKS, PART, PART_ML, COS, SIN, Q_NORM,
    q_stride, q_head, table_width, scale, softcap, eps, splits, parts,
    KV: tl.constexpr, G: tl.constexpr, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, T: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, NORM: tl.constexpr,
    ONE_PLUS: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """The pages that up to R rows begin with, read once for their M >= R * G queries; grid (blocks, KV heads, splits).

    Its splits are the last of a row's parts. Every row is behind these pages, so nothing is masked but dead rows' work.
    """
    block, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, d, t = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, T)
    in_d = d < D
    row = tl.load(BLOCKS + block * R + i // G, mask=i < R * G, other=-1)
    real = row >= 0
    n = tl.load(LENS + row, mask=real, other=0)
    first = tl.load(BLOCKS + block * R)
    tiles = tl.load(SHARED + first, mask=first >= 0, other=0) // T  # asked for here, as every answer takes its time
    if tl.max(n, 0) > 0:
        head = h * G + i % G
        inside = real[:, None] & in_d[None, :]
        position = tl.maximum(n - 1, 0)[:, None]
        q_row = (row * q_stride + head * q_head)[:, None]
        q = apply_rope(Q, q_row, inside, d, Q_NORM, COS, SIN, position, eps, D, NORM, ONE_PLUS, ROPE)
        span = tl.cdiv(tiles, splits)
        low = split * span
        m = tl.full((M,), -float("inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, DP), tl.float32)
        for tile in range(low, tl.minimum(low + span, tiles)):
            page = tl.load(TABLES + first * table_width + tile * T // PAGE).to(tl.int64)
            at = ((page * KV + h) * PAGE + tile * T % PAGE + t[:, None]) * D + d[None, :]
            k = tl.load(K + at, mask=in_d[None, :], other=0.0)
            v = tl.load(V + at, mask=in_d[None, :], other=0.0)
            s = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
            acc, total, m = _add_values(acc, total, m, s, v, PRECISION)
        place = (row * KV * G + head) * parts + parts - splits + split
        _store_part(PART, PART_ML, place, real, d, acc, total, m, D)


@triton.jit(do_not_specialize=["splits", "parts"])
def combine_parts(
    PART, PART_ML, SHARED, LENS, OUT, splits, parts,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SHARES: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """Merge what was computed apart for one (row, head): its own splits, and those of a shared prefix if it has one.

    Grid (rows * heads,).
    """
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, PP), tl.arange(0, DP)
    count = splits
    if SHARES:
        row = head // H  # a dead one's shared parts may never have been written
        count = tl.where((tl.load(SHARED + row) > 0) & (tl.load(LENS + row) > 0), parts, splits)
    there = s < count
    m = tl.load(PART_ML + (head * parts + s) * 2, mask=there, other=-float("inf"))
    total = tl.load(PART_ML + (head * parts + s) * 2 + 1, mask=there, other=0.0)
    share = tl.exp(m - tl.max(m, 0))
    inside = there[:, None] & (d[None, :] < D)
    part = tl.load(PART + (head * parts + s[:, None]) * D + d[None, :], mask=inside, other=0.0)
    whole = tl.sum(total * share, 0)
    out = tl.sum(part * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(OUT + head * D + d, out.to(OUT.dtype.element_ty), mask=d < D)


@triton.jit
def prefill_attention(
    Q, K, V, TABLES, BLOCK_ROW, BLOCK_START, ROW_FIRST, ROW_COUNT, ROW_LEN, OUT, SINK,
    table_width, scale, softcap, window,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Prompts and appends, ragged: block i holds queries BLOCK_START.. of row BLOCK_ROW; grid (blocks, heads).

    The KV of the new tokens is in the pages already. Row r's tokens are ROW_FIRST..+ROW_COUNT of the
    step, and the last ROW_COUNT of its ROW_LEN positions.
    """
    block, h = tl.program_id(0), tl.program_id(1)
    row = tl.load(BLOCK_ROW + block)
    start = tl.load(BLOCK_START + block)
    first, count, length = tl.load(ROW_FIRST + row), tl.load(ROW_COUNT + row), tl.load(ROW_LEN + row)
    i, d, t = tl.arange(0, M), tl.arange(0, DP), tl.arange(0, PAGE)
    in_d = d < D
    real = (start + i < count)[:, None] & in_d[None, :]
    at_q = (first + start + i[:, None]).to(tl.int64) * (H * D) + h * D + d[None, :]
    q = tl.load(Q + at_q, mask=real, other=0.0)
    position = length - count + start + i
    last = tl.minimum(length - count + start + M, length)
    low = tl.maximum(length - count + start - window + 1, 0) // PAGE if WINDOW else 0
    m = tl.full((M,), -1e30, tl.float32)
    total = tl.zeros((M,), tl.float32)
    if SINKS:
        m = tl.zeros((M,), tl.float32) + tl.load(SINK + h).to(tl.float32)
        total = tl.full((M,), 1.0, tl.float32)
    acc = tl.zeros((M, DP), tl.float32)
    for p in range(low, tl.cdiv(last, PAGE)):
        page = tl.load(TABLES + row * table_width + p).to(tl.int64)
        at = ((page * KV + h // (H // KV)) * PAGE + t[:, None]) * D + d[None, :]
        key = p * PAGE + t
        inside = (key < length)[:, None] & in_d[None, :]
        k = tl.load(K + at, mask=inside, other=0.0)
        v = tl.load(V + at, mask=inside, other=0.0)
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        s = tl.where(seen, _scores(q, k, scale, softcap, SOFTCAP, PRECISION), -float("inf"))
        acc, total, m = _add_values(acc, total, m, s, v, PRECISION)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(OUT + at_q, out.to(OUT.dtype.element_ty), mask=real)
