"""Triton kernels of recurrent layers: they update the states in the store, by slot number.

A state is read once and written once. In a decode step each row is one token; a row of length 0 is dead: its state is
neither read nor written, and its output is finite and meaningless. With RUNS a row is LENS[row] tokens from
FIRSTS[row] on, one after the other. Numbers are rounded where the transformers modules round them.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) as in torch. The sum loses the low bits of a small exp(x), the quotient restores them."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    small = u == 1.0
    log1p = tl.where(small, e, tl.log(u) * (e / tl.where(small, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _channel_inputs(at, COLUMNS, c, inside, channels, E: tl.constexpr, MAPPED: tl.constexpr, GATED: tl.constexpr):
    """What a convolution reads of the channels c of a token, whose row of X begins at `at`."""
    if MAPPED:
        x = tl.load(at + tl.load(COLUMNS + c, mask=c < channels, other=0), mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(at + c, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        x = (x * tl.load(at + 2 * channels + c, mask=inside, other=0.0).to(tl.float32)).to(E).to(tl.float32)
    return x


@triton.jit
def _channel_outputs(out, at, BIAS, c, inside, channels, E: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr,
                     GATED: tl.constexpr):  # fmt: skip
    """What becomes of the sums over the windows."""
    if BIASED:
        out += tl.load(BIAS + c, mask=inside, other=0.0).to(tl.float32)
    out = out.to(E)
    if SILU:
        out = _silu(out.to(tl.float32)).to(E)
    if GATED:
        gate = tl.load(at + channels + c, mask=inside, other=0.0).to(tl.float32)
        out = (gate * out.to(tl.float32)).to(E)
    return out


@triton.jit
def convolution_step(
    X, COLUMNS, W, BIAS, STATE, SLOTS, LENS, OUT, x_stride, slot_stride, channels,
    K: tl.constexpr, WINDOW: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, MAPPED: tl.constexpr,
    BIASED: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A causal convolution of each channel over its window STATE [slots, channels, WINDOW] and the new token.

    Grid (rows, blocks of channels). W is [channels, K]. MAPPED: channel c of a row is in column COLUMNS[c] of X.
    GATED (LFM2): a row of X is three vectors, the input is the first times the third, and the output is multiplied by
    the second.
    """
    row = tl.program_id(0).to(tl.int64)
    c, s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WP)
    inside = c < channels
    alive = c < tl.where(tl.load(LENS + row) > 0, channels, 0)
    E: tl.constexpr = OUT.dtype.element_ty
    at = X + row * x_stride
    x = _channel_inputs(at, COLUMNS, c, inside, channels, E, MAPPED, GATED)
    windows = STATE + tl.load(SLOTS + row).to(tl.int64) * slot_stride
    state_at = windows + c[:, None] * WINDOW + s[None, :]
    held = alive[:, None] & (s < WINDOW)[None, :]
    state = tl.load(state_at, mask=held, other=0.0)
    tap = s - (WINDOW - K + 1)  # the oldest token of a window of K is not seen by the new one
    seen = inside[:, None] & ((tap >= 0) & (s < WINDOW))[None, :]
    w = tl.load(W + c[:, None] * K + tap[None, :], mask=seen, other=0.0).to(tl.float32)
    out = tl.sum(state.to(tl.float32) * w, 1) + x * tl.load(W + c * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    out = _channel_outputs(out, at, BIAS, c, inside, channels, E, BIASED, SILU, GATED)
    tl.store(OUT + row * channels + c, out, mask=inside)
    tl.debug_barrier()  # the window moves by one place: all threads have read before one of them writes
    tl.store(state_at - 1, state, mask=held & (s > 0)[None, :])
    tl.store(windows + c * WINDOW + WINDOW - 1, x.to(STATE.dtype.element_ty), mask=alive)


@triton.jit
def convolution_runs(
    X, COLUMNS, W, BIAS, STATE, SLOTS, FIRSTS, ROW_OF, OUT, x_stride, slot_stride, channels,
    K: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, MAPPED: tl.constexpr, BIASED: tl.constexpr,
    SILU: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The same over rows of tokens; grid (tokens, blocks of channels). `keep_windows` moves the windows afterwards."""
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    E: tl.constexpr = OUT.dtype.element_ty
    row = tl.load(ROW_OF + token)
    first = tl.load(FIRSTS + row).to(tl.int64)
    windows = STATE + tl.load(SLOTS + row).to(tl.int64) * slot_stride
    out = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(K):
        source = token - (K - 1) + tap
        new = tl.where(source >= first, channels, 0)  # channels to be read of X; all others are in the window
        x = _channel_inputs(X + source * x_stride, COLUMNS, c, c < new, channels, E, MAPPED, GATED)
        held = tl.load(windows + c * WINDOW + WINDOW + (source - first), mask=inside & (c >= new), other=0.0)
        w = tl.load(W + c * K + tap, mask=inside, other=0.0).to(tl.float32)
        out += (x + held.to(tl.float32)) * w
    out = _channel_outputs(out, X + token * x_stride, BIAS, c, inside, channels, E, BIASED, SILU, GATED)
    tl.store(OUT + token * channels + c, out, mask=inside)


@triton.jit
def keep_windows(
    X, COLUMNS, STATE, SLOTS, FIRSTS, LENS, x_stride, slot_stride, channels,
    WINDOW: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, MAPPED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """STATE [slots, channels, WINDOW] = the last WINDOW tokens of each row and of the window before it; grid (rows,
    blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    c, s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, WP)[None, :]
    inside = (c < channels) & (s < WINDOW)
    E: tl.constexpr = X.dtype.element_ty
    first, count = tl.load(FIRSTS + row).to(tl.int64), tl.load(LENS + row)
    state_at = STATE + tl.load(SLOTS + row).to(tl.int64) * slot_stride + c * WINDOW + s
    source = count - WINDOW + s  # of the row's tokens; before the first one, in the window
    is_new = source >= 0
    at = X + (first + source) * x_stride
    x = _channel_inputs(at, COLUMNS, c, inside & is_new, channels, E, MAPPED, GATED)
    held = tl.load(state_at + count, mask=inside & (source < 0), other=0.0).to(tl.float32)
    tl.debug_barrier()  # all threads have read before one of them writes
    tl.store(state_at, (x + held).to(STATE.dtype.element_ty), mask=inside)


@triton.jit
def delta_rule_step(
    QKV, Z, B, A, A_LOG, DT_BIAS, NORM, STATE, SLOTS, LENS, FIRSTS, OUT,
    x_stride, z_group, b_group, slot_stride, eps, q_scale, beta_scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """The gated delta rule, and the gated norm of its output; grid (rows, HV).

    QKV [tokens, 2 HK DK + HV DV] comes from the convolution. Z, B and A point into the rows of a projection, which are
    x_stride apart; the HV / HK value heads of a key head follow one another, and the next key head's are z_group (of B
    and A: b_group) further. STATE is [slots, HV, DK, DV].
    """
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    REPEATS: tl.constexpr = HV // HK
    hk, r = h // REPEATS, h % REPEATS
    i, j = tl.arange(0, DKP), tl.arange(0, DVP)
    in_k, in_v = i < DK, j < DV
    E: tl.constexpr = OUT.dtype.element_ty
    state_at = STATE + tl.load(SLOTS + row).to(tl.int64) * slot_stride + h * DK * DV + i[:, None] * DV + j[None, :]
    held = (i < tl.where(tl.load(LENS + row) > 0, DK, 0))[:, None] & in_v[None, :]
    state = tl.load(state_at, mask=held, other=0.0).to(tl.float32)
    decay_scale = tl.exp(tl.load(A_LOG + h).to(tl.float32))
    dt_bias = tl.load(DT_BIAS + h).to(tl.float32)
    weight = tl.load(NORM + j, mask=in_v, other=0.0).to(tl.float32)
    first, end = row, row + 1
    if RUNS:
        first = tl.load(FIRSTS + row).to(tl.int64)
        end = first + tl.load(LENS + row)
    for t in tl.range(first, end, num_stages=1):
        qkv = QKV + t * (2 * HK * DK + HV * DV)
        q = tl.load(qkv + hk * DK + i, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(qkv + (HK + hk) * DK + i, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(qkv + 2 * HK * DK + h * DV + j, mask=in_v, other=0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * q_scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        of_head = t * x_stride + hk * b_group + r
        beta = tl.sigmoid(tl.load(B + of_head).to(tl.float32)).to(E).to(tl.float32) * beta_scale
        decay = tl.exp(-decay_scale * _softplus(tl.load(A + of_head).to(tl.float32) + dt_bias))
        state = state * decay
        delta = (v - tl.sum(state * k[:, None], 0)) * beta
        state = state + k[:, None] * delta[None, :]
        out = tl.sum(state * q[:, None], 0).to(E).to(tl.float32)
        normed = (out * tl.rsqrt(tl.sum(out * out, 0) / DV + eps)).to(E).to(tl.float32)
        normed = (weight * normed).to(NORM.dtype.element_ty).to(tl.float32)
        z = tl.load(Z + t * x_stride + hk * z_group + r * DV + j, mask=in_v, other=0.0).to(tl.float32)
        tl.store(OUT + (t * HV + h) * DV + j, (normed * _silu(z)).to(E), mask=in_v)
    tl.store(state_at, state.to(STATE.dtype.element_ty), mask=held)


@triton.jit
def mamba_step(
    XBC, DT, A_LOG, DT_BIAS, D, STATE, SLOTS, LENS, FIRSTS, OUT, dt_stride, slot_stride,
    H: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, GROUPS: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """The selective state update of Mamba 2; grid (rows, H).

    XBC [tokens, H P + 2 GROUPS N] comes from the convolution, DT points into the rows of a projection. STATE is
    [slots, H, P, N]. The modules scan several tokens in float32, and compute a single one in their dtype.
    """
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = h // (H // GROUPS)
    i, j = tl.arange(0, PP), tl.arange(0, NP)
    in_p, in_n = i < P, j < N
    E: tl.constexpr = OUT.dtype.element_ty
    state_at = STATE + tl.load(SLOTS + row).to(tl.int64) * slot_stride + h * P * N + i[:, None] * N + j[None, :]
    held = (i < tl.where(tl.load(LENS + row) > 0, P, 0))[:, None] & in_n[None, :]
    state = tl.load(state_at, mask=held, other=0.0).to(tl.float32)
    R: tl.constexpr = tl.float32 if RUNS else E
    decay_scale = -tl.exp(tl.load(A_LOG + h).to(tl.float32))
    dt_bias, d = tl.load(DT_BIAS + h).to(E).to(tl.float32), tl.load(D + h).to(tl.float32)
    first, end = row, row + 1
    if RUNS:
        first = tl.load(FIRSTS + row).to(tl.int64)
        end = first + tl.load(LENS + row)
    for t in tl.range(first, end, num_stages=1):
        xbc = XBC + t * (H * P + 2 * GROUPS * N)
        x = tl.load(xbc + h * P + i, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(xbc + H * P + group * N + j, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(xbc + H * P + (GROUPS + group) * N + j, mask=in_n, other=0.0).to(tl.float32)
        dt = tl.load(DT + t * dt_stride + h).to(tl.float32) + dt_bias
        dt = _softplus(dt.to(E).to(tl.float32)).to(E).to(tl.float32)
        b = (dt * b).to(R).to(tl.float32)
        state = state * tl.exp(dt * decay_scale) + (b[None, :] * x[:, None]).to(R).to(tl.float32)
        out = tl.sum(state.to(R).to(tl.float32) * c[None, :], 1).to(R).to(tl.float32)
        skip = (x * d).to(tl.float32 if RUNS else D.dtype.element_ty).to(tl.float32)
        tl.store(OUT + (t * H + h) * P + i, (out + skip).to(E), mask=in_p)
    tl.store(state_at, state.to(STATE.dtype.element_ty), mask=held)


@triton.jit
def gated_group_norm(X, GATE, W, OUT, gate_stride, width, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """OUT = the RMS norm of X * silu(GATE) within groups of SIZE columns, times W; grid (rows, groups)."""
    row, group, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside, at = i < SIZE, group * SIZE + i
    E: tl.constexpr = OUT.dtype.element_ty
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    x = x * _silu(tl.load(GATE + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32))
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)).to(E).to(tl.float32)
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + row * width + at, (x * w).to(E), mask=inside)


@triton.jit
def gate_heads(X, GATE, OUT, gate_stride, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """OUT [rows, H, D] = X * sigmoid(GATE), whose heads are 2 D apart; grid (rows, H)."""
    row, h, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DP)
    inside = d < D
    E: tl.constexpr = OUT.dtype.element_ty
    at = (row * H + h) * D + d
    gate = tl.load(GATE + row * gate_stride + h * 2 * D + d, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(OUT + at, (x * tl.sigmoid(gate).to(E).to(tl.float32)).to(E), mask=inside)
