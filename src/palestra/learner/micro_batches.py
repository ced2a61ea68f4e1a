"""Micro-batches of the local learner: their size, packing and results, and recovery when one does not fit in memory."""

from __future__ import annotations

import gc
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, nothing_scored, pack
from palestra.algo.losses import TokenStats
from palestra.algo.step_loss import Loss, LossTerms
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.machine import memory_gib, to_device
from palestra.core.ranks import Ranks
from palestra.core.types import Array
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention import Layout
from palestra.plan.device import GIB, Device, cpu, find_device
from palestra.plan.memory import captured_micro_batch
from palestra.plan.of_config import work_of
from palestra.plan.shape import shape_of
from palestra.plan.work import MICRO_BATCH


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """One forward and backward pass."""

    batch: MicroBatch
    policy: Tensor  # indices of the scored tokens that count in the policy loss
    echo: Tensor  # indices of those that count in the ECHO term
    layout: Layout


@dataclass(frozen=True, slots=True)
class PackedBatch:
    micro_batches: list[PackedMicroBatch]
    policy_lengths: Tensor  # [R] policy tokens of each row
    echo_lengths: Tensor  # [R]

    def pad_passes(self, count: int, device: torch.device) -> None:
        """Add passes that score nothing: every rank takes as many, since each pass gathers the shards of all."""
        while len(self.micro_batches) < count:
            self.micro_batches.append(_to_device(nothing_scored(), echo=False, device=device))


def pack_batch(
    batch: Batch, *, echo: bool, device: torch.device, shapes: Shapes | None = None, at_least: int = 1, **options: Any
) -> PackedBatch:
    """Pack on the host, then copy to the device, so that no pass waits for it later.

    `options` are those of `algo.batching.pack`. Micro-batches that fit one of `shapes` are padded to it.
    """
    evenly = device.type == "cuda" or at_least > 1  # the largest one determines memory or time
    batches = pack(batch, echo=echo, evenly=evenly, at_least=at_least, **options)
    policy_lengths, echo_lengths = np.zeros((2, batch.rows), np.int64)
    for micro in batches:
        rows = micro.row.numpy()
        policy_lengths += np.bincount(rows[micro.policy_mask.numpy()], minlength=batch.rows)
        echo_lengths += np.bincount(rows[micro.echo_mask.numpy()], minlength=batch.rows)
    lengths = to_device([torch.from_numpy(policy_lengths), torch.from_numpy(echo_lengths)], device)
    return PackedBatch([_to_device(micro, echo, device, shapes) for micro in batches], *lengths)


def tokens_to_column(parts: Sequence[tuple[PackedMicroBatch, Tensor]], batch: Batch) -> Array:
    """A column of the batch's tokens (or targets) out of values at scored tokens; NaN elsewhere."""
    size = len(batch.token_ids) if batch.targets is None else len(batch.targets.ids)
    column = np.full(size, np.nan, dtype=np.float32)
    for micro, values in parts:
        column[micro.batch.at] = values.detach().float().cpu().numpy()
    return column


def _to_device(batch: MicroBatch, echo: bool, device: torch.device, shapes: Shapes | None = None) -> PackedMicroBatch:
    # On the host, before the copy: on a GPU this would wait.
    policy = np.flatnonzero(batch.policy_mask.numpy())
    observed = np.flatnonzero(batch.echo_mask.numpy()) if echo else policy[:0]
    policy_on, observed_on = to_device(map(torch.from_numpy, (policy, observed)), device)
    return PackedMicroBatch(batch.to(device), policy_on, observed_on, Layout(batch.trees, device, shapes, batch.root))


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
    scorer: Any, score: Callable[[PackedMicroBatch], T], packed: PackedBatch, smaller: Callable[..., PackedBatch]
) -> list[tuple[PackedMicroBatch, T]]:
    """What `score` gives for each micro-batch. Those from one on that does not fit in memory are given to `smaller`."""
    parts: list[tuple[PackedMicroBatch, T]] = []
    waiting = deque(packed.micro_batches)
    with scorer.session(training=False):
        while waiting:
            micro = waiting.popleft()
            scored = unless_out_of_memory(partial(score, micro))
            if scored is None:
                waiting = deque(smaller([micro, *waiting]).micro_batches)
            else:
                parts.append((micro, scored))
    return parts


def rows_of(micros: Iterable[PackedMicroBatch]) -> set[int]:
    """The rows of the batch that these micro-batches hold."""
    return {row for micro in micros for row in micro.batch.row.tolist()}


class MicroBatchLimit:
    """The tokens of a micro-batch, halved when they do not fit; said once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._lowered_from: int | None = None
        self._warned = False

    def halve(self, failed: PackedMicroBatch) -> None:
        tokens = len(failed.batch.token_ids)
        if len(rows_of([failed])) < 2:
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


@dataclass(slots=True)
class LocalOutputs:
    """The results of one forward_backward, still on the device."""

    batch: Batch
    loss: Loss
    terms: Tensor  # [K] float64: the terms of the loss
    stats: TokenStats
    token_losses: list[tuple[Tensor, Tensor]]  # [N] losses and their rows, for error messages
    token_logprobs: list[tuple[PackedMicroBatch, Tensor]]
    token_entropies: list[tuple[PackedMicroBatch, Tensor]]

    @classmethod
    def empty(cls, batch: Batch, loss: Loss, device: torch.device) -> LocalOutputs:
        terms = torch.zeros(len(loss.weights), dtype=torch.float64, device=device)
        return cls(batch, loss, terms, TokenStats(), [], [], [])

    def logprobs(self) -> Array:
        return tokens_to_column(self.token_logprobs, self.batch)

    def entropies(self) -> Array:
        return tokens_to_column(self.token_entropies, self.batch)

    def metrics(self) -> dict[str, float]:
        return self.loss.metrics(self.terms, self.stats) | self.costs()

    def costs(self) -> dict[str, float]:
        """Tokens computed and memory used on this machine."""
        costs = {"tokens_computed": float(sum(len(micro.batch.token_ids) for micro, _ in self.token_logprobs))}
        if self.terms.is_cuda:
            costs["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.terms.device) / 2**30
        return costs

    def add(self, micro: PackedMicroBatch, terms: LossTerms, logprobs: Tensor, entropies: Tensor) -> None:
        """Add the results of one micro-batch's forward pass; log-probabilities and entropies are [N]."""
        self.terms += terms.terms
        self.stats += terms.stats
        self.token_losses.append((terms.token_losses, terms.row))
        self.token_logprobs.append((micro, logprobs))
        self.token_entropies.append((micro, entropies))


def explain_not_finite(pending: Sequence[LocalOutputs], loss: float, grad_norm: float, ranks: Ranks) -> str:
    """Names the groups with a NaN or an infinity; all of them where their losses are finite, but not the gradient."""
    guilty, everyone = set[int](), set[int]()
    for outputs in pending:
        sums = torch.zeros(outputs.batch.rows, device=outputs.terms.device)  # of the losses of each row
        for token_loss, row in outputs.token_losses:
            sums.index_add_(0, row, token_loss.float())
        guilty.update(outputs.batch.groups[(~sums.isfinite()).cpu().numpy()].tolist())
        everyone.update(outputs.batch.groups.tolist())
    guilty, everyone = (set[int]().union(*ranks.gather(groups, set[int])) for groups in (guilty, everyone))
    groups = guilty or everyone
    what = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
    return (
        f"group {', '.join(map(str, sorted(groups)))}: {what}, expected a finite number; the weights are unchanged. "
        "Lower train.learning_rate, or use float32 or bfloat16 instead of float16"
    )
