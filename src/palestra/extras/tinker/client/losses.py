"""A step's loss in the terms of a Tinker server: losses that are sums over tokens, with weights from the caller.

The server knows the logprob of each token and no more, so a loss that is a function of logprobs is sent as its
gradient: cross-entropy with the weights −∂loss/∂logprob. On-policy, where every ratio is 1, that gradient is known
beforehand. With old logprobs, the server's `ppo` and `cispo` compute it themselves. Else a forward pass comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import LossTokens, StepLoss
from palestra.core.types import Array

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A batch's share of the loss under given logprobs, and its gradient."""

    metrics: dict[str, float]
    gradient: Array  # [T] ∂loss/∂logprob
    row_losses: Array  # [R] float64

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.row_losses).all() and np.isfinite(self.gradient).all())


def server_loss(objective: Objective, batch: Batch) -> tuple[Literal["ppo", "cispo"], dict[str, float]] | None:
    """The server's own loss and its clipping for an objective, where it has one and every old logprob is known."""
    other_terms = objective.beta or objective.importance_correction != "none" or objective.sequence_ratio
    others = (objective.custom, objective.off_policy_mask_threshold, objective.delta)
    if other_terms or any(option is not None for option in others):
        return None
    if batch.old_logprobs is None or not np.isfinite(batch.old_logprobs[batch.predicted(batch.policy_mask)]).all():
        return None
    if objective.loss in CLIPPED_LOSSES:
        clip = {"clip_low_threshold": 1.0 - objective.epsilon, "clip_high_threshold": objective.upper}
        return "ppo", clip
    if objective.loss == "cispo":
        return "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": objective.upper}
    return None


def needs_forward(objective: Objective, batch: Batch) -> bool:
    """Whether the gradient depends on the policy's own logprobs; it does not where every ratio is 1."""
    knows_old = batch.old_logprobs is not None and bool(np.isfinite(batch.old_logprobs[batch.policy_mask]).any())
    corrects = objective.importance_correction != "none" or objective.off_policy_mask_threshold is not None
    return knows_old or corrects or objective.beta > 0 or objective.custom is not None


def scored_tokens(batch: Batch, *, echo: bool) -> tuple[LossTokens, Array]:
    """All scored tokens of a batch on the host, in float64, and [N] their places in its columns."""
    policy = batch.predicted(batch.policy_mask)
    observed = batch.predicted(batch.echo_mask) if echo else np.zeros_like(policy)
    at = np.flatnonzero(policy | observed)
    columns = {name: getattr(batch, name) for name in ("logprobs", "advantages", "old_logprobs", "ref_logprobs")}
    tokens = LossTokens(
        rows=batch.rows,
        row=torch.from_numpy(batch.row_of(at)),
        inputs={n: torch.from_numpy(x[at].astype(np.float64)) for n, x in columns.items() if x is not None},
        policy=torch.from_numpy(np.flatnonzero(policy[at])),
        echo=torch.from_numpy(np.flatnonzero(observed[at])),
        policy_lengths=torch.from_numpy(batch.count(policy)),
        echo_lengths=torch.from_numpy(batch.count(observed)),
    )
    return tokens, at


def step_terms(batch: Batch, loss: StepLoss, logprobs: Array) -> StepTerms:
    """The loss of a batch whose tokens have these logprobs [T]."""
    tokens, at = scored_tokens(batch, echo=loss.echo_tokens > 0)
    own = torch.from_numpy(np.nan_to_num(logprobs[at].astype(np.float64), nan=0.0)).requires_grad_()
    found = loss(tokens, own, None)
    total = (found.terms * torch.tensor(loss.weights, dtype=torch.float64)).sum()
    gradient = np.zeros(len(batch.token_ids))
    if total.requires_grad:
        [by_own] = torch.autograd.grad(total, [own], materialize_grads=True)
        gradient[at] = by_own.numpy()
    row_losses = np.zeros(batch.rows)
    np.add.at(row_losses, found.row.numpy(), (found.token_losses * _policy_weights(loss, tokens)).numpy())
    return StepTerms(loss.metrics(found.terms.detach(), found.stats), gradient, row_losses)


def weighted_advantages(loss: StepLoss, batch: Batch) -> Array:
    """[T] the advantages times the weight of each policy token in the loss; 0 for all other tokens."""
    tokens, at = scored_tokens(batch, echo=False)
    weighted = np.zeros(len(batch.token_ids))
    weighted[at] = batch.advantages[at] * _policy_weights(loss, tokens).numpy()
    return weighted


def echo_gradient(loss: StepLoss, batch: Batch) -> Array:
    """[T] the gradient of the ECHO term alone."""
    tokens, at = scored_tokens(batch, echo=True)
    own = torch.zeros(len(at), dtype=torch.float64, requires_grad=True)
    [by_own] = torch.autograd.grad(loss.echo_coefficient * loss.echo_term(tokens, own), [own])
    gradient = np.zeros(len(batch.token_ids))
    gradient[at] = by_own.numpy()
    return gradient


def _policy_weights(loss: StepLoss, tokens: LossTokens) -> Tensor:
    return loss.token_weights(tokens if tokens.policy is None else tokens.select(tokens.policy))
