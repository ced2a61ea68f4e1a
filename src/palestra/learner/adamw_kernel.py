"""AdamW with float32 master weights as one Triton kernel over all weights: what it needs is read once and written once.

It clips by a factor on the device, takes gradients as they were computed (bfloat16 or float32), and writes the model's
rounded weights along with the masters: 28 bytes a weight, and 48 by a pass for each of these.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.core.machine import ALIGNMENT, to_device

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
