"""Triton kernels of the CUDA path: tokens are chosen and recorded without a host sync."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_stats(LOGITS, TEMPERATURE, STATS, vocabulary, blocks, BLOCK: tl.constexpr):
    """Maximum and sum of exponentials of each block of logits; grid (rows, blocks)."""
    b, i = tl.program_id(0), tl.program_id(1)
    at = i * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(TEMPERATURE + b)
    x = tl.load(LOGITS + b.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    x = x / temperature
    top = tl.max(x, 0)
    tl.store(STATS + (b * blocks + i) * 2, top)
    tl.store(STATS + (b * blocks + i) * 2 + 1, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _masses(STATS, at_row, blocks, NB: tl.constexpr):
    """Of each block of a row its maximum and its mass, both for all blocks: (maxima, highest of them, masses, sum)."""
    i = tl.arange(0, NB)
    real = i < blocks
    tops = tl.load(STATS + (at_row * blocks + i) * 2, mask=real, other=-float("inf"))
    sums = tl.load(STATS + (at_row * blocks + i) * 2 + 1, mask=real, other=0.0)
    top = tl.max(tops, 0)
    mass = tl.where(real & (tops > -float("inf")), sums * tl.exp(tops - top), 0.0)
    return tops, top, mass, tl.sum(mass, 0)


@triton.jit
def score(LOGITS, STATS, TEMPERATURE, TARGET, LOGPROB, LSE, vocabulary, blocks, NB: tl.constexpr):
    """The logprob of each row's TARGET, to the bit as if it had been chosen; grid (rows,)."""
    b = tl.program_id(0)
    _, top, _, total = _masses(STATS, b, blocks, NB)
    chosen = tl.load(LOGITS + b.to(tl.int64) * vocabulary + tl.load(TARGET + b)).to(tl.float32)
    tl.store(LOGPROB + b, chosen / tl.load(TEMPERATURE + b) - top - tl.log(total))
    tl.store(LSE + b, top + tl.log(total))


@triton.jit
def _choose(
    LOGITS, STATS, at_row, temperature, greedy, draw, vocabulary, blocks, BLOCK: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """A token by inverse CDF from one row of logits, and its logprob."""
    i, t = tl.arange(0, NB), tl.arange(0, BLOCK)
    tops, top, mass, total = _masses(STATS, at_row, blocks, NB)
    target = draw * total
    reached = tl.cumsum(mass, 0)
    block = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), blocks - 1)
    # masses and cumulative sums are rounded differently, so a draw may land past the last block or token that has any
    # probability; then the most likely one is taken
    empty = tl.sum(tl.where(i == block, mass, 0.0), 0) == 0.0
    block = tl.where(greedy | empty, tl.argmax(tops, 0), block)  # one block holds the token
    before = tl.sum(tl.where(i < block, mass, 0.0), 0)
    base = LOGITS + at_row.to(tl.int64) * vocabulary
    at = block * BLOCK + t
    x = tl.load(base + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32) / temperature
    weights = tl.exp(x - top)
    drawn = tl.sum((tl.cumsum(weights, 0) <= target - before).to(tl.int32), 0)
    impossible = tl.sum(tl.where(t == drawn, weights, 0.0), 0) == 0.0
    token = tl.minimum(block * BLOCK + tl.where(greedy | impossible, tl.argmax(x, 0), drawn), vocabulary - 1)
    chosen = tl.load(base + token).to(tl.float32) / temperature
    return token, chosen - top - tl.log(total)


@triton.jit(do_not_specialize=["stops"])
def choose_and_advance(
    LOGITS, STATS, TEMPERATURE, GREEDY, DRAWS, STOPS, IDS, STARTS, POSITIONS, LENS, LEFT, TOKENS, LOGPROBS,
    vocabulary, blocks, rows, stops,
    BLOCK: tl.constexpr, NB: tl.constexpr, NS: tl.constexpr,
):  # fmt: skip
    """Choose and record each row's token, and prepare the row for its next step; grid (rows,).

    A row continues while it has tokens LEFT and none of its STOPS came; a dead row records nothing. Its step is its
    distance from STARTS, so that the same captured kernel serves every step.
    """
    b = tl.program_id(0)
    left = tl.load(LEFT + b)
    position = tl.load(POSITIONS + b)
    temperature = tl.load(TEMPERATURE + b)
    greedy = tl.load(GREEDY + b) != 0
    s = tl.arange(0, NS)
    stop_ids = tl.load(STOPS + s * rows + b, mask=s < stops, other=-1)
    token = tl.load(IDS + b)
    if left > 0:
        step = position - tl.load(STARTS + b)
        draw = tl.load(DRAWS + step * rows + b)
        token, logprob = _choose(LOGITS, STATS, b, temperature, greedy, draw, vocabulary, blocks, BLOCK, NB)
        tl.store(TOKENS + step * rows + b, token)
        tl.store(LOGPROBS + step * rows + b, logprob)
        stopped = tl.sum((stop_ids == token).to(tl.int32), 0) > 0
        left = tl.where(stopped, 0, left - 1)
        position = tl.where(left > 0, position + 1, position)
    tl.store(LEFT + b, tl.maximum(left, 0))
    tl.store(LENS + b, tl.where(left > 0, position + 1, 0))
    if left > 0:
        tl.store(IDS + b, token)
        tl.store(POSITIONS + b, position)
