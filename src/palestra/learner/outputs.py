"""Results of the local learner's passes, still on the device, and the error for a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import TokenStats
from palestra.algo.step_loss import Loss, LossTerms
from palestra.core.ranks import Ranks
from palestra.core.types import Array
from palestra.learner.packed import PackedMicroBatch, tokens_to_column


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

    def add(self, micro: PackedMicroBatch, out: MicroOutputs) -> None:
        found = out.loss
        self.terms += found.terms.detach()
        self.stats += found.stats
        self.token_losses.append((found.token_losses, found.row))
        self.token_logprobs.append((micro, out.logprobs))
        self.token_entropies.append((micro, out.entropies))

    def groups_not_finite(self) -> set[int]:
        """The groups of rows whose own loss is not finite."""
        sums = torch.zeros(self.batch.rows, device=self.terms.device)
        for token_loss, row in self.token_losses:
            sums.index_add_(0, row, token_loss.float())
        return set(self.batch.groups[(~sums.isfinite()).cpu().numpy()].tolist())


@dataclass(frozen=True, slots=True)
class MicroOutputs:
    """The results of one micro-batch's forward pass."""

    loss: LossTerms
    logprobs: Tensor  # [N]
    entropies: Tensor  # [N]


def explain_not_finite(pending: Sequence[LocalOutputs], loss: float, grad_norm: float, ranks: Ranks) -> str:
    """Names the groups with a NaN or an infinity; all of them where their losses are finite, but not the gradient."""
    guilty = {group for found in pending for group in found.groups_not_finite()}
    everyone = {group for found in pending for group in found.batch.groups.tolist()}
    guilty, everyone = (set[int]().union(*ranks.gather(groups)) for groups in (guilty, everyone))
    groups = guilty or everyone
    what = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
    return (
        f"group {', '.join(map(str, sorted(groups)))}: {what}, expected a finite number; the weights are unchanged. "
        "Lower train.learning_rate, or use float32 or bfloat16 instead of float16"
    )
