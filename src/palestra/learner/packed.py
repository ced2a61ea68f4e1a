"""A batch as the local learner computes it: packed micro-batches on the device, and what a row's mean divides by."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import MicroBatch, nothing_scored, pack
from palestra.core.machine import to_device
from palestra.core.types import Array, Sample
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention import Layout


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """One forward and backward pass."""

    batch: MicroBatch
    policy: Tensor  # indices of the scored tokens that count in the policy loss
    echo: Tensor  # indices of those that count in the ECHO term
    layout: Layout
    row: Array  # [N] on the host, as `place`
    place: Array  # [N]


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
    samples: Sequence[Sample],
    *,
    max_tokens: int,
    share_prefix: bool,
    echo: bool,
    device: torch.device,
    rows: Collection[int] | None = None,
    at_least: int = 1,
    shapes: Shapes | None = None,
) -> PackedBatch:
    """Pack on the host, then copy to the device, so that no pass waits for it later; `rows`: of these rows alone.

    `at_least` so many micro-batches, where there are enough groups. Those that fit one of `shapes` are padded to it.
    """
    evenly = device.type == "cuda" or at_least > 1  # where the largest one needs the memory, or is waited for
    batches = pack(
        samples,
        max_tokens=max_tokens,
        share_prefix=share_prefix,
        echo=echo,
        rows=rows,
        evenly=evenly,
        at_least=at_least,
    )
    lengths = to_device((_row_lengths(batches, len(samples), name) for name in ("policy_mask", "echo_mask")), device)
    return PackedBatch([_to_device(batch, echo, device, shapes) for batch in batches], *lengths)


def rows_to_tokens(rows: Sequence[Array], micro: PackedMicroBatch, device: torch.device) -> Tensor:
    """[N] the values of one array a row at the micro-batch's scored tokens."""
    ends = np.cumsum([0, *map(len, rows)])
    values = np.concatenate([np.zeros(0), *rows])[ends[micro.row] + micro.place]
    return torch.from_numpy(values.astype(np.float32)).to(device)


def tokens_to_rows(parts: Sequence[tuple[PackedMicroBatch, Tensor]], samples: Sequence[Sample]) -> list[Array]:
    """The reverse: [T] an array for each sample, NaN where no token was scored."""
    ends = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    whole = np.full(ends[-1], np.nan, dtype=np.float32)
    for micro, values in parts:
        whole[ends[micro.row] + micro.place] = values.detach().float().cpu().numpy()
    return [whole[start:end] for start, end in pairwise(ends.tolist())]


def _to_device(batch: MicroBatch, echo: bool, device: torch.device, shapes: Shapes | None = None) -> PackedMicroBatch:
    # Found before the copy: a GPU would have to be waited for.
    policy = np.flatnonzero(batch.policy_mask.numpy())
    observed = np.flatnonzero(batch.echo_mask.numpy()) if echo else policy[:0]
    policy_on, observed_on = to_device(map(torch.from_numpy, (policy, observed)), device)
    return PackedMicroBatch(
        batch.to(device),
        policy_on,
        observed_on,
        Layout(batch.trees, device, shapes),
        batch.row.numpy(),
        batch.place.numpy(),
    )


def _row_lengths(batches: list[MicroBatch], rows: int, mask: str) -> Tensor:
    """[rows] how many scored tokens of each row the mask selects."""
    total = np.zeros(rows, np.int64)
    for batch in batches:
        total += np.bincount(batch.row.numpy()[getattr(batch, mask).numpy()], minlength=rows)
    return torch.from_numpy(total)
