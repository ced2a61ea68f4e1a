"""Triton kernels of the head: each reads a chunk of logits once; the gradient is written where the logits were."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.learner.logit_rule import LogitRule

BLOCK = 2048


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


def statistics(logits: Tensor, target: Tensor, rule: LogitRule) -> tuple[Tensor, Tensor, Tensor]:
    """[n] log-probability of the target, log-sum-exp, and entropy."""
    rows, vocabulary = logits.shape
    logprob, lse, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    _statistics[(rows,)](
        logits, target, logprob, lse, entropy, vocabulary, rule.multiplier, rule.softcap or 1.0, rule.temperature,
        SOFTCAP=rule.softcap is not None, BLOCK=BLOCK, PER=8, num_warps=8,
    )  # fmt: skip
    return logprob, lse, entropy


def logit_gradient(
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    rule: LogitRule,
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
