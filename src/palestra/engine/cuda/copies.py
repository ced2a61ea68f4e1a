"""Arrays of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of the array. The host does not wait for it: from pinned memory, which torch keeps until it was read."""
    source = torch.from_numpy(array)
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source.clone()


def padded_tables(tables: Sequence[list[int]]) -> np.ndarray:
    """Page tables of unlike lengths as one array, with zeros behind the short ones."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), np.int32)
    pages = np.fromiter(chain.from_iterable(tables), np.int32, lengths.sum())
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = pages
    return padded
