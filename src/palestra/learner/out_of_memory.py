"""A micro-batch that does not fit in the GPU's memory: what it held is given back, and less is computed at once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger("palestra")
T = TypeVar("T")


def unless_out_of_memory(work: Callable[[], T]) -> T | None:
    """What the work gives; None where the GPU's memory ran out.

    Where several processes compute together the error stays one: the others would wait for this one's share.
    """
    try:
        return work()
    except torch.OutOfMemoryError:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise
    # Out here nothing holds the frames in which it happened, and so their tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


class MicroBatchLimit:
    """The tokens of a micro-batch, halved when they do not fit; said once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._lowered_from: int | None = None
        self._warned = False

    def halve(self, tokens: int, rows: int) -> None:
        """A micro-batch of so many tokens and rows did not fit."""
        if rows < 2:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: one row of {tokens} tokens does not fit, and cannot be divided"
            )
        self._lowered_from = self._lowered_from or tokens
        self.tokens = max(1, min(self.tokens, tokens) // 2)

    def log_reduction(self) -> None:
        """Once the work is done with smaller micro-batches."""
        if self._lowered_from is None:
            return
        log.log(
            logging.INFO if self._warned else logging.WARNING,
            "CUDA out of memory with %d tokens in a micro-batch: it was computed in parts, and training goes on with "
            "at most %d (train.tokens_per_micro_batch); the gradient is the same",
            self._lowered_from,
            self.tokens,
        )
        self._warned, self._lowered_from = True, None
