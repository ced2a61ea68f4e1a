"""One optimizer step's worth of samples: its packed micro-batches and the normalisers of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.algo.batching import MicroBatch, pack, split_minibatches
from palestra.core.config import TrainSection
from palestra.core.types import Sample

# These reductions divide by the tokens of the whole batch of rollouts, however many steps it is split into.
BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")


@dataclass(slots=True)
class Work:
    """One micro-batch of a step, with what is computed once for all passes over it."""

    batch: MicroBatch
    trained: Tensor  # indices of the scored tokens that count in the policy loss
    observed: Tensor  # indices of those that count in the ECHO term
    old: Tensor | None = None  # [N] behaviour log-probabilities; None: exactly on-policy
    reference: Tensor | None = None  # [N]


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one optimizer step and the normalisers of its loss."""

    samples: list[Sample]
    works: list[Work]
    advantages: Tensor  # [R]
    trained_lengths: Tensor  # [R]
    observed_lengths: Tensor  # [R]
    tokens_total: float  # what token-mean losses divide by
    trained_tokens: int
    observed_tokens: int
    observed_rows: int
    longest_row: int


def make_minibatches(
    samples: Sequence[Sample], objective: TrainSection, *, share_prefix: bool, observed: bool, device: torch.device
) -> list[Minibatch]:
    """The batch of rollouts split into `objective.minibatches` optimizer steps, packed and moved to the device."""
    chunks = split_minibatches(samples, objective.minibatches)
    max_tokens = objective.tokens_per_micro_batch
    packed = [pack(c, max_tokens=max_tokens, share_prefix=share_prefix, observed=observed) for c in chunks]
    trained = [_row_lengths(b, len(c), "trained") for c, b in zip(chunks, packed, strict=True)]
    mean_tokens = sum(int(lengths.sum()) for lengths in trained) / len(chunks)
    parts = []
    for chunk, batches, lengths in zip(chunks, packed, trained, strict=True):
        seen = _row_lengths(batches, len(chunk), "observed")
        own = int(lengths.sum())
        parts.append(
            Minibatch(
                samples=chunk,
                works=[_work(batch, device) for batch in batches],
                advantages=torch.tensor([s.advantage for s in chunk], dtype=torch.float32).to(device),
                trained_lengths=lengths.to(device),
                observed_lengths=seen.to(device),
                tokens_total=mean_tokens if objective.loss in BATCH_TOKEN_LOSSES else own,
                trained_tokens=own,
                observed_tokens=int(seen.sum()),
                observed_rows=int((seen > 0).sum()),
                longest_row=max(len(s.token_ids) for s in chunk),
            )
        )
    return parts


def _work(batch: MicroBatch, device: torch.device) -> Work:
    # Found before the move: a GPU would have to be waited for.
    trained, observed = (mask.nonzero().squeeze(-1).to(device) for mask in (batch.trained, batch.observed))
    return Work(batch.to(device), trained, observed)


def _row_lengths(batches: list[MicroBatch], rows: int, mask: str) -> Tensor:
    """[rows] how many scored tokens of each row the mask selects."""
    total = torch.zeros(rows, dtype=torch.int64)
    for batch in batches:
        total += torch.bincount(batch.row[getattr(batch, mask)], minlength=rows)
    return total
