"""The size of micro-batches, and recovery when one does not fit in memory."""

from __future__ import annotations

import gc
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from palestra.algo.batching import MicroBatch
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.machine import memory_gib
from palestra.plan.device import GIB, Device, cpu, find_device
from palestra.plan.memory import captured_micro_batch
from palestra.plan.of_config import work_of
from palestra.plan.shape import shape_of
from palestra.plan.work import MICRO_BATCH


def data_sheet(where: torch.device) -> Device | None:
    """The device with its data sheet's figures, regardless of its current load; None for an unknown GPU."""
    if where.type != "cuda":
        return cpu(torch.get_num_threads(), memory_gib())
    try:
        return find_device(torch.cuda.get_device_name(where))
    except PalestraError:
        return None


def device_of(where: torch.device) -> Device | None:
    """The device with the memory that this process can have of it; None for a GPU without figures."""
    sheet = data_sheet(where)
    if sheet is None or not sheet.is_gpu:
        return sheet
    free, total = torch.cuda.mem_get_info(where)
    others = total - free - torch.cuda.memory_reserved(where)  # other processes, and the driver
    return replace(sheet, memory_gib=min(sheet.memory_gib, (total - others) / GIB))


def micro_batch_tokens(config: RunConfig, model_config: Any, where: torch.device, *, whole_logits: bool) -> int:
    """The tokens of a micro-batch; `whole_logits`: it holds the model's logits of every token."""
    shape, device = shape_of(model_config), device_of(where)
    if shape is None or device is None or whole_logits:
        return config.train.tokens_per_micro_batch or MICRO_BATCH
    return work_of(config, shape, device, prompt_tokens=1).tokens_per_micro_batch


def captured_tokens(config: RunConfig, model_config: Any, where: torch.device) -> int:
    """The tokens of the largest micro-batch whose pass is worth capturing, padding included.

    The memory that is left is rounded to the GPU's whole memory, a half, a quarter and so on: with another limit some
    micro-batches are not padded, and round differently. What other processes use should not make another run.
    """
    shape, device, whole = shape_of(model_config), device_of(where), data_sheet(where)
    if shape is None or device is None or whole is None or not device.memory_gib > 0:
        return 0
    halves = round(math.log2(device.memory_gib / whole.memory_gib))
    device = replace(whole, memory_gib=whole.memory_gib * 2.0**halves)
    return captured_micro_batch(shape, device, work_of(config, shape, device, prompt_tokens=1))


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


def score_all(
    scorer: Any, score: Callable[[MicroBatch], T], packed: list[MicroBatch], smaller: Callable[..., list[MicroBatch]]
) -> list[tuple[MicroBatch, T]]:
    """What `score` gives for each micro-batch. Those from one on that does not fit in memory are given to `smaller`."""
    parts: list[tuple[MicroBatch, T]] = []
    waiting = deque(packed)
    with scorer.session(training=False):
        while waiting:
            micro = waiting.popleft()
            scored = unless_out_of_memory(partial(score, micro))
            if scored is None:
                waiting = deque(smaller([micro, *waiting]))
            else:
                parts.append((micro, scored))
    return parts


def rows_of(micros: Iterable[MicroBatch]) -> set[int]:
    """The rows of the batch that these micro-batches hold."""
    return {row for micro in micros for row in micro.row.tolist()}


class MicroBatchLimit:
    """The tokens of a micro-batch, halved when they do not fit; said once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.lowered_from: int | None = None
        self._warned = False

    def halve(self, failed: MicroBatch) -> None:
        tokens = len(failed.token_ids)
        if len(rows_of([failed])) < 2:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory: one row of {tokens} tokens does not fit, and cannot be divided"
            )
        self.lowered_from = self.lowered_from or tokens
        self.tokens = max(1, min(self.tokens, tokens) // 2)

    def log_reduction(self) -> None:
        """Once the work is done with smaller micro-batches."""
        log.log(
            logging.INFO if self._warned else logging.WARNING,
            "CUDA out of memory with %d tokens in a micro-batch: it was computed in parts, and training goes on with "
            "at most %d (train.tokens_per_micro_batch); the gradient is the same",
            self.lowered_from,
            self.tokens,
        )
        self._warned, self.lowered_from = True, None
