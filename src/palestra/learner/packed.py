"""A batch as the local learner computes it: packed micro-batches on the device, and what a row's mean divides by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, nothing_scored, pack
from palestra.core.transfer import to_device
from palestra.core.types import Array
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention import Layout


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
    batch: Batch,
    *,
    max_tokens: int,
    max_rows: int | None = None,
    share_prefix: bool,
    echo: bool,
    device: torch.device,
    rows: Collection[int] | None = None,
    at_least: int = 1,
    shapes: Shapes | None = None,
) -> PackedBatch:
    """Pack on the host, then copy to the device, so that no pass waits for it later; see `algo.batching.pack`.

    Micro-batches that fit one of `shapes` are padded to it.
    """
    evenly = device.type == "cuda" or at_least > 1  # the largest one determines memory or time
    batches = pack(
        batch,
        max_tokens=max_tokens,
        max_rows=max_rows,
        share_prefix=share_prefix,
        echo=echo,
        rows=rows,
        evenly=evenly,
        at_least=at_least,
    )
    lengths = to_device((_row_lengths(batches, batch.rows, name) for name in ("policy_mask", "echo_mask")), device)
    return PackedBatch([_to_device(micro, echo, device, shapes) for micro in batches], *lengths)


def column_to_tokens(column: Array, micro: PackedMicroBatch, device: torch.device) -> Tensor:
    """[N] float32 the values of a column at the micro-batch's tokens."""
    return torch.from_numpy(column[micro.batch.at].astype(np.float32)).to(device)


def tokens_to_column(parts: Sequence[tuple[PackedMicroBatch, Tensor]], batch: Batch) -> Array:
    """The reverse: a column of the batch's tokens (or targets), NaN where none was scored."""
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
    return PackedMicroBatch(batch.to(device), policy_on, observed_on, Layout(batch.trees, device, shapes))


def _row_lengths(batches: list[MicroBatch], rows: int, mask: str) -> Tensor:
    """[rows] how many scored tokens of each row the mask selects."""
    total = np.zeros(rows, np.int64)
    for batch in batches:
        total += np.bincount(batch.row.numpy()[getattr(batch, mask).numpy()], minlength=rows)
    return torch.from_numpy(total)
