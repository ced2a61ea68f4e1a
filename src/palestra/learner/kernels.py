"""Triton kernels of the learner: AdamW over all weights at once, the head's two passes over a chunk of logits, and the
merge of the two halves of tree attention."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.core.machine import ALIGNMENT, to_device
from palestra.engine.cuda.exact import logprobs_of

BLOCK = 2048


@triton.jit
def _at(TABLE, column, count, tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in the table to a column's tensor."""
    pointer = tl.load(TABLE + column * count + tensor).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _adamw(
    TABLE, DECAY, CORRECTION, TENSOR, CHUNK, FACTOR, FINITE, count, lr, beta1, rest1, beta2, rest2, eps,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one tensor a program. The table's columns: numel, master, both moments, gradient, weight."""
    tensor = tl.load(TENSOR + tl.program_id(0))
    at = tl.load(CHUNK + tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(TABLE + tensor) * tl.load(FINITE)
    if ALIGNED:  # also in number: then several are read at once
        end = tl.multiple_of(end, 16)
    inside = at < end
    MASTER = _at(TABLE, 1, count, tensor, tl.float32, ALIGNED)
    AVERAGE = _at(TABLE, 2, count, tensor, tl.float32, ALIGNED)
    SQUARE = _at(TABLE, 3, count, tensor, tl.float32, ALIGNED)
    g = tl.load(_at(TABLE, 4, count, tensor, GRADIENT, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(FACTOR)
    average = tl.load(AVERAGE + at, mask=inside, other=0.0) * beta1 + g * rest1
    square = tl.load(SQUARE + at, mask=inside, other=0.0) * beta2 + g * g * rest2
    master = tl.load(MASTER + at, mask=inside, other=0.0)
    master -= lr * tl.load(DECAY + tensor) * master
    spread = tl.sqrt(square / tl.load(CORRECTION + count + tensor)) + eps
    master -= lr / tl.load(CORRECTION + tensor) * average / spread
    tl.store(AVERAGE + at, average, mask=inside)
    tl.store(SQUARE + at, square, mask=inside)
    tl.store(MASTER + at, master, mask=inside)
    tl.store(_at(TABLE, 5, count, tensor, WEIGHT, ALIGNED) + at, master.to(WEIGHT), mask=inside)


def adamw(
    masters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    weights: Sequence[Tensor],
    steps: Tensor,  # [n]
    decay: Sequence[float],
    *,
    factor: Tensor,
    finite: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Update masters, moments and weights by the gradients times `factor`; nothing, where `finite` (int64) is 0.

    All are contiguous; `steps` count this update already. Masters and moments are float32.
    """
    pointers = [[x.data_ptr() for x in column] for column in (masters, *moments, gradients, weights)]
    table, device = np.array([[x.numel() for x in masters], *pointers]), masters[0].device
    beta1, beta2 = map(float, betas)
    logs = [[math.log(beta) if beta else -math.inf] for beta in (beta1, beta2)]
    small = (torch.tensor(numbers, dtype=torch.float32) for numbers in (decay, logs))
    pointer_table, decays, log_betas = to_device((torch.from_numpy(table), *small), device)
    corrections = -torch.expm1(log_betas * steps)  # [2, n]: 1 - beta^step
    chunk_tensors, chunks = _chunks(tuple(table[0].tolist()), device)
    _adamw[(len(chunks),)](
        pointer_table, decays, corrections, chunk_tensors, chunks, factor, finite,
        len(masters), float(lr), beta1, 1 - beta1, beta2, 1 - beta2, float(eps),
        GRADIENT=_TYPES[gradients[0].dtype], WEIGHT=_TYPES[weights[0].dtype],
        ALIGNED=not (table % ALIGNMENT).any(), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@lru_cache(maxsize=4)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """([P] tensor, [P] which chunk of it) for each program."""
    counts = -(-np.array(sizes) // BLOCK)
    tensors = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    chunks = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
    return to_device((torch.from_numpy(tensors), torch.from_numpy(chunks)), device)


@triton.jit
def _final(LOGITS, at, inside, multiplier, softcap, temperature, SOFTCAP: tl.constexpr):
    """(logits as they are sampled from, what the softcap lets through of a gradient)."""
    x = tl.load(LOGITS + at, mask=inside, other=-float("inf")).to(tl.float32) * multiplier
    slope = tl.full(x.shape, 1.0, tl.float32)
    if SOFTCAP:
        bent = 2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0  # tanh
        slope = 1.0 - bent * bent
        x = softcap * bent
    return tl.where(inside, x / temperature, -float("inf")), slope


@triton.jit
def _statistics(
    LOGITS, TARGET, LOGPROB, LSE, ENTROPY, vocabulary, multiplier, softcap, temperature,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """One row a program: running softmaxes, one for each run of PER places in a block, merged at the end.

    A run belongs to one thread, which shrinks its sums once for all of it: exponentials are what this kernel
    costs. Beside each sum of e^z goes that of e^z·z, for the entropy.
    """
    RUNS: tl.constexpr = BLOCK // PER
    row = tl.program_id(0)
    base = row.to(tl.int64) * vocabulary
    t = tl.arange(0, RUNS)[:, None] * PER + tl.arange(0, PER)[None, :]
    top = tl.full((RUNS,), -1e30, tl.float32)
    total = tl.zeros((RUNS,), tl.float32)
    weighted = tl.zeros((RUNS,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        inside = first + t < vocabulary
        z, _ = _final(LOGITS, base + first + t, inside, multiplier, softcap, temperature, SOFTCAP)
        new = tl.maximum(top, tl.max(z, 1))
        shrink = tl.exp(top - new)
        e = tl.exp(z - new[:, None])
        total = total * shrink + tl.sum(e, 1)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * z, 0.0), 1)
        top = new
    highest = tl.max(top, 0)
    share = tl.exp(top - highest)
    sum_e = tl.sum(total * share, 0)
    lse = highest + tl.log(sum_e)
    target = base + tl.load(TARGET + row)
    chosen, _ = _final(
        LOGITS, target + tl.arange(0, 1), tl.arange(0, 1) == 0, multiplier, softcap, temperature, SOFTCAP
    )
    tl.store(LOGPROB + row, tl.sum(chosen, 0) - lse)
    tl.store(LSE + row, lse)
    tl.store(ENTROPY + row, lse - tl.sum(weighted * share, 0) / sum_e)


@triton.jit
def _gradient(
    LOGITS, TARGET, LSE, GRAD, ENTROPY, GRAD_ENTROPY, vocabulary, multiplier, softcap, temperature,
    SOFTCAP: tl.constexpr, STEER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks); STEER: the entropy carries a gradient too."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    at = row.to(tl.int64) * vocabulary + column
    z, slope = _final(LOGITS, at, inside, multiplier, softcap, temperature, SOFTCAP)
    log_p = z - tl.load(LSE + row)
    p = tl.exp(log_p)
    grad = tl.load(GRAD + row)
    out = tl.where(column == tl.load(TARGET + row), grad, 0.0) - p * grad
    if STEER:
        spread = tl.where(inside, log_p, 0.0) + tl.load(ENTROPY + row)
        out -= p * spread * tl.load(GRAD_ENTROPY + row)
    out *= slope * (multiplier / temperature)
    tl.store(LOGITS + at, out.to(LOGITS.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, target: Tensor, rule: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[n] log-probability of the target, log-sum-exp, and entropy."""
    rows, vocabulary = logits.shape
    logprob, lse, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](
        logits, target, logprob, lse, entropy, vocabulary, rule.multiplier, rule.softcap or 1.0, rule.temperature,
        SOFTCAP=rule.softcap is not None, BLOCK=BLOCK, PER=8, num_warps=8,
    )  # fmt: skip
    if rule.exact:
        logprob, lse = logprobs_of(logits, target, rule.temperature)
    return logprob, lse, entropy


def logit_gradient(
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    rule: Any,
) -> Tensor:
    """[n, V] gradient of the raw logits, in their dtype and in their place."""
    rows, vocabulary = logits.shape
    steer = entropy is not None and grad_entropy is not None
    grads = (grad_logprobs, entropy, grad_entropy) if steer else (grad_logprobs,) * 3
    _gradient[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, target, logsumexp, *(x.contiguous() for x in grads if x is not None), vocabulary,
        rule.multiplier, rule.softcap or 1.0, rule.temperature,
        SOFTCAP=rule.softcap is not None, STEER=steer, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return logits


ROWS = 32


@triton.jit(do_not_specialize=["tokens", "lse_stride", "half_lse_stride"])  # which differ in every micro-batch
def _merge(
    OUT, LSE, HALF, HALF_LSE, tokens, size, out_stride, lse_stride, half_stride, half_lse_stride,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tokens, heads)."""
    head = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    own = tl.load(LSE + head * lse_stride + token, mask=inside, other=0.0)
    other = tl.load(HALF_LSE + head * half_lse_stride + token, mask=inside, other=0.0)
    top = tl.maximum(own, other)
    both = top + tl.log(tl.exp(own - top) + tl.exp(other - top))
    tl.debug_barrier()  # every warp reads LSE for itself: none may come after the one that overwrites it
    tl.store(LSE + head * lse_stride + token, both, mask=inside)
    column = tl.arange(0, SIZE)
    row = token.to(tl.int64)[:, None]
    at = head * size + column[None, :]
    mask = inside[:, None] & (column < size)[None, :]
    a = tl.load(OUT + row * out_stride + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(HALF + row * half_stride + at, mask=mask, other=0.0).to(tl.float32)
    merged = a * tl.exp(own - both)[:, None] + b * tl.exp(other - both)[:, None]
    tl.store(OUT + row * out_stride + at, merged.to(OUT.dtype.element_ty), mask=mask)


def merge(out: Tensor, lse: Tensor, half: Tensor, half_lse: Tensor) -> None:
    """As `tree_attention_cuda.merge`; each token's heads lie together, and each head's log-sum-exps."""
    tokens, heads, size = out.shape
    _merge[(triton.cdiv(tokens, ROWS), heads)](
        out, lse, half, half_lse, tokens, size, out.stride(0), lse.stride(0), half.stride(0),
        half_lse.stride(0), ROWS=ROWS, SIZE=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip
