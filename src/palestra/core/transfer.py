"""From the host's memory to a GPU's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT = 16  # bytes: what kernels that read several numbers at once expect


def to_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The host's tensors on a device.

    In one transfer, since each costs a wait, and put together by numpy: torch would wake a thread on every core for
    each of them, which takes milliseconds on a large machine. From pinned memory: a GPU's stream is not waited for.
    """
    import torch

    found = list(tensors)
    if all(x.device == device for x in found):
        return found
    ends = list(accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in found), initial=0))
    together = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for x, start in zip(found, ends, strict=False):
        together.numpy()[start : start + x.nbytes] = x.numpy().reshape(-1).view(np.uint8)
    moved = together.to(device, non_blocking=True)
    return [moved[start : start + x.nbytes].view(x.dtype).view(x.shape) for x, start in zip(found, ends, strict=False)]


def put(*pairs: tuple[Tensor, np.ndarray]) -> None:
    """Each array into the first rows and columns of its tensor, all in one transfer."""
    import torch

    arrays = to_device((torch.from_numpy(array) for _, array in pairs), pairs[0][0].device)
    for (target, _), source in zip(pairs, arrays, strict=True):
        target[: source.shape[0], : source.shape[1]].copy_(source)
