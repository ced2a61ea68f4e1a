"""What the local learner's passes found, still on the device, and what is said of a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.algo.losses import TokenStats
from palestra.algo.step_loss import StepLoss
from palestra.core.ranks import Ranks
from palestra.core.types import Array
from palestra.learner.base import Batch
from palestra.learner.packed import PackedMicroBatch, tokens_to_rows


@dataclass(slots=True)
class LocalOutputs:
    """The results of one forward_backward, still on the device."""

    batch: Batch
    loss: StepLoss
    parts: Tensor  # [3] float64: policy loss, cross-entropy on tool results, entropy bonus
    stats: TokenStats
    token_losses: list[tuple[Tensor, Tensor]]  # [N] losses and their rows, for messages
    token_logprobs: list[tuple[PackedMicroBatch, Tensor]]
    token_entropies: list[tuple[PackedMicroBatch, Tensor]]

    @classmethod
    def empty(cls, batch: Batch, loss: StepLoss, device: torch.device) -> LocalOutputs:
        return cls(batch, loss, torch.zeros(3, dtype=torch.float64, device=device), TokenStats(), [], [], [])

    def logprobs(self) -> list[Array]:
        return tokens_to_rows(self.token_logprobs, self.batch.samples)

    def entropies(self) -> list[Array]:
        return tokens_to_rows(self.token_entropies, self.batch.samples)

    def metrics(self) -> dict[str, float]:
        return loss_metrics(self.loss, self.parts, self.stats) | self.costs()

    def costs(self) -> dict[str, float]:
        """What it took on this machine."""
        costs = {"tokens_computed": float(sum(len(micro.batch.token_ids) for micro, _ in self.token_logprobs))}
        if self.parts.is_cuda:
            costs["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.parts.device) / 2**30
        return costs

    def add(self, micro: PackedMicroBatch, out: MicroOutputs) -> None:
        self.parts += out.parts.detach()
        self.stats += out.stats
        self.token_losses.append((out.token_loss, out.row))
        self.token_logprobs.append((micro, out.logprobs))
        self.token_entropies.append((micro, out.entropies))

    def groups_not_finite(self) -> set[int]:
        """The groups of rows whose own loss is not finite."""
        sums = torch.zeros(len(self.batch.samples), device=self.parts.device)
        for token_loss, row in self.token_losses:
            sums.index_add_(0, row, token_loss.float())
        return {self.batch.samples[r].group for r in (~sums.isfinite()).nonzero().flatten().tolist()}


@dataclass(frozen=True, slots=True)
class MicroOutputs:
    """What the forward pass of one micro-batch found."""

    parts: Tensor  # [3], with their gradient
    stats: TokenStats
    token_loss: Tensor  # [N] as the others, without a gradient
    row: Tensor
    logprobs: Tensor
    entropies: Tensor


def loss_metrics(loss: StepLoss, parts: Tensor, stats: TokenStats) -> dict[str, float]:
    policy, echo, bonus = parts.tolist()
    metrics = {"loss": policy + loss.echo_coefficient * echo + bonus, "policy_loss": policy}
    if loss.echo_tokens:
        metrics["echo_loss"] = echo
    return metrics | stats.finish()


def explain_not_finite(pending: Sequence[LocalOutputs], loss: float, grad_norm: float, ranks: Ranks) -> str:
    """Which groups brought a NaN or an infinity; all of them where their losses are finite, but not the gradient."""
    guilty = {group for found in pending for group in found.groups_not_finite()}
    everyone = {sample.group for found in pending for sample in found.batch.samples}
    guilty, everyone = (set[int]().union(*ranks.gather(groups)) for groups in (guilty, everyone))
    groups = guilty or everyone
    what = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
    return (
        f"group {', '.join(map(str, sorted(groups)))}: {what}, expected a finite number; the weights are unchanged. "
        "Lower train.learning_rate, or use float32 or bfloat16 instead of float16"
    )
