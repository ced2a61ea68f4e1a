"""Linear layers with the same input as one product: q, k and v together, gate and up together.

The layers' parameters become views of one buffer, so nothing is held twice, and whoever writes them in place
(an optimizer, a policy's update) keeps the buffer up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def fuse(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [sum of outputs, inputs] and bias [sum of outputs] of the layers, one below the other.

    Layers that lie in one buffer already stay there, so all engines on one module share it.
    """
    with torch.inference_mode(False), torch.no_grad():  # the parameters are trained later
        weight = _in_one_buffer([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return weight, _in_one_buffer(biases) if biases else None


def _in_one_buffer(parts: Sequence[Tensor]) -> Tensor:
    first, sizes = parts[0], [len(part) for part in parts]
    if _are_adjacent(parts):
        shape = (sum(sizes), *first.shape[1:])
        return first.data.as_strided(shape, first.stride(), first.storage_offset())
    whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split(sizes), strict=True):
        part.data = view
    return whole


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    same_storage = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    contiguous = all(part.is_contiguous() for part in parts)
    return same_storage and contiguous and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parts))
