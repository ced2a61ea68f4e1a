"""The kernels of `model.exact`: what is computed for a token does not depend on the other tokens of a step.

Products, attention and the normaliser of logits add up in one order, whatever the number of rows and wherever keys lie.
So a prompt's prefill, decode steps and the learner's forward pass (`learner/exact.py`) give the same bits.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.engine.cuda.kernels import _add_values, _scores
from palestra.engine.cuda.paged_ops import RopeAndNorm, pad, precision, rope_and_store
from palestra.engine.cuda.state import VOCABULARY_BLOCK, block_stats, score

ROWS, COLUMNS, DEPTH = 64, 64, 64  # of a product's tile
KEYS = 64  # that are read at once


@triton.jit
def _add_product(out, X, W, m, n, rows, width, depth, BK: tl.constexpr, PRECISION: tl.constexpr):
    """out [BM, BN] += rows m of X times rows n of W."""
    k = tl.arange(0, BK)
    x_at = X + m[:, None].to(tl.int64) * depth + k[None, :]
    w_at = W + n[None, :].to(tl.int64) * depth + k[:, None]
    for first in range(0, depth, BK):
        inside = first + k < depth
        x = tl.load(x_at + first, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + first, mask=(n < width)[None, :] & inside[:, None], other=0.0)
        out = tl.dot(x, w, out, input_precision=PRECISION)
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    X, W, LOW, UP, OUT, rows, width, depth, rank,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, ADAPTED: tl.constexpr,
):  # fmt: skip
    """OUT [rows, width] = X @ W.T, ADAPTED: + LOW @ UP.T; grid (columns of tiles, rows of tiles)."""
    m, n = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    out = tl.zeros((BM, BN), tl.float32)
    out = _add_product(out, X, W, m, n, rows, width, depth, BK, PRECISION)
    if ADAPTED:
        out = _add_product(out, LOW, UP, m, n, rows, width, rank, BK, PRECISION)
    at = m[:, None].to(tl.int64) * width + n[None, :]
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=(m < rows)[:, None] & (n < width)[None, :])


def product(x: Tensor, weight: Tensor, adapter: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """x [N, in] @ weight [out, in].T, plus the product of an adapter's factors [N, r] and [out, r], rounded once."""
    x, weight = x.contiguous(), weight.contiguous()
    rows, (width, depth) = len(x), weight.shape
    low, up = (x, weight) if adapter is None else adapter
    out = x.new_empty(rows, width)
    if rows:
        _product[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, ROWS))](
            x, weight, low, up, out, rows, width, depth, up.shape[1], BM=ROWS, BN=COLUMNS, BK=DEPTH,
            PRECISION=precision(x.dtype), ADAPTED=adapter is not None, num_warps=4, num_stages=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_width", "window"])
def _attention(
    Q, K, V, TABLES, TABLE, POSITIONS, PAGES, OUT, table_width, scale, window,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    T: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A token's queries over the keys up to its own, T at once from the first position on; grid (tokens, KV heads).

    TABLE is the row of TABLES that holds the token's pages. A token whose page is -1 is padding.
    """
    token, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(POSITIONS + token)
    length = tl.where(tl.load(PAGES + token) >= 0, position + 1, 0)
    table = TABLES + tl.load(TABLE + token).to(tl.int64) * table_width
    g, d, t = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, T)
    in_d = d < D
    head = token * (KV * G) + h * G + g
    real = (g < G)[:, None] & in_d[None, :]
    q = tl.load(Q + head[:, None] * D + d[None, :], mask=real, other=0.0)
    first = tl.maximum(position - window + 1, 0) // T if WINDOW else 0
    m = tl.full((GP,), -1e30, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    for i in range(first, tl.cdiv(length, T)):
        key = i * T + t
        seen = key < length
        page = tl.load(table + key // PAGE, mask=seen, other=0).to(tl.int64)
        at = ((page * KV + h) * PAGE + key % PAGE)[:, None] * D + d[None, :]
        inside = seen[:, None] & in_d[None, :]
        k = tl.load(K + at, mask=inside, other=0.0)
        v = tl.load(V + at, mask=inside, other=0.0)
        if WINDOW:
            seen = seen & (key > position - window)
        s = tl.where(seen[None, :], _scores(q, k, scale, 0.0, False, PRECISION), -float("inf"))
        acc, total, m = _add_values(acc, total, m, s, v, PRECISION)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(OUT + head[:, None] * D + d[None, :], out.to(OUT.dtype.element_ty), mask=real)


@dataclass(slots=True)
class ExactPlan:
    """Tokens of several rows, in any order, with the pages that they attend to."""

    keys: Tensor  # [layers, pages, KV heads, page, D]
    values: Tensor
    tables: Tensor  # [rows, pages]
    ids: Tensor  # [N]
    positions: Tensor  # [N]
    pages: Tensor  # [N] page of each token; -1: padding
    rows: Tensor  # [N] which of the tables is the token's

    def over_pages(self, layer: int, qkv: Tensor, scale: float, window: int, rope: RopeAndNorm) -> Tensor:
        """qkv [N, H + 2 KV, D]: keys and values are stored, and what the queries attend to [N, H, D]."""
        keys, values = self.keys[layer], self.values[layer]
        q = rope_and_store(qkv, keys, values, self.pages, self.positions, rope)
        tokens, heads, dim = q.shape
        kv_heads = keys.shape[1]
        out = torch.empty_like(q)
        _attention[(tokens, kv_heads)](
            q, keys, values, self.tables, self.rows, self.positions, self.pages, out, self.tables.stride(0), scale,
            window, KV=kv_heads, G=heads // kv_heads, GP=pad(heads // kv_heads), D=dim, DP=pad(dim),
            PAGE=keys.shape[2], T=KEYS, WINDOW=window > 0, PRECISION=precision(q.dtype), num_warps=4, num_stages=2,
        )  # fmt: skip
        return out


@torch.no_grad()
def logprobs_of(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """([N] log-probability of each row's target, [N] log-sum-exp), as the sampler computes them for what it chooses."""
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, VOCABULARY_BLOCK)
    stats = logits.new_empty(rows * blocks * 2, dtype=torch.float32)
    temperatures = torch.full((rows,), temperature, dtype=torch.float32, device=logits.device)
    logprobs, lse = torch.empty(2, rows, device=logits.device)
    if rows:
        block_stats[(rows, blocks)](
            logits, temperatures, stats, vocabulary, blocks, BLOCK=VOCABULARY_BLOCK, num_warps=4
        )
        score[(rows,)](
            logits, stats, temperatures, target, logprobs, lse, vocabulary, blocks, NB=1 << (blocks - 1).bit_length(),
            num_warps=4,
        )  # fmt: skip
    return logprobs, lse
