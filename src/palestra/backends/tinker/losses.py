"""A step's loss in the terms of a Tinker server: losses that are sums over tokens, with weights from the caller.

The server knows the logprob of each token and no more, so a loss that is a function of logprobs is sent as its
gradient: cross-entropy with the weights −∂loss/∂logprob. On-policy, where every ratio is 1, that gradient is known
beforehand. With old logprobs, the server's `ppo` and `cispo` compute it themselves. Else a forward pass comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palestra.algo.echo import world_model_loss
from palestra.algo.losses import Objective, TokenStats, policy_loss, token_weights
from palestra.algo.step_loss import StepLoss
from palestra.core.types import Array, Sample
from palestra.learner.base import Batch

CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True, slots=True)
class StepTerms:
    """A batch's share of the loss under given logprobs, and its gradient."""

    policy: float
    echo: float
    stats: TokenStats
    gradients: list[Array]  # [T] for each sample: ∂loss/∂logprob
    row_losses: Array  # [R] float64

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.row_losses).all() and all(np.isfinite(row).all() for row in self.gradients))


@dataclass(frozen=True, slots=True)
class ServerLoss:
    """A loss that the server computes from old logprobs and advantages."""

    name: Literal["ppo", "cispo"]
    config: Mapping[str, float]


def server_loss(objective: Objective, batch: Batch) -> ServerLoss | None:
    """The server's own form of an objective, where it has one and every old logprob is known."""
    other_terms = objective.beta or objective.importance_correction != "none" or objective.sequence_ratio
    if other_terms or objective.off_policy_mask_threshold is not None or objective.delta is not None:
        return None
    if batch.old_logprobs is None or not _all_known(batch.samples, batch.old_logprobs):
        return None
    if objective.loss in CLIPPED_LOSSES:
        clip = {"clip_low_threshold": 1.0 - objective.epsilon, "clip_high_threshold": objective.upper}
        return ServerLoss("ppo", clip)
    if objective.loss == "cispo":
        return ServerLoss("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": objective.upper})
    return None


def needs_forward(objective: Objective, batch: Batch) -> bool:
    """Whether the gradient depends on the policy's own logprobs; it does not where every ratio is 1."""
    knows_old = batch.old_logprobs is not None and any(
        np.isfinite(old[s.policy_mask]).any() for s, old in zip(batch.samples, batch.old_logprobs, strict=True)
    )
    corrects = objective.importance_correction != "none" or objective.off_policy_mask_threshold is not None
    return knows_old or corrects or objective.beta > 0


def step_terms(batch: Batch, loss: StepLoss, logprobs: Sequence[Array]) -> StepTerms:
    """The loss of a batch whose tokens have these logprobs ([T] for each sample)."""
    samples = batch.samples
    leaf = torch.from_numpy(np.nan_to_num(np.concatenate(list(logprobs)).astype(np.float64), nan=0.0))
    leaf.requires_grad_()
    policy = _Tokens.of(samples, [s.policy_mask for s in samples])
    own = leaf[policy.place]
    unknown = own.detach()

    def known(rows: Sequence[Array] | None) -> Tensor | None:
        if rows is None:
            return None
        values = torch.from_numpy(np.concatenate(list(rows)).astype(np.float64))[policy.place]
        return torch.where(values.isnan(), unknown, values)

    objective = loss.objective
    token_loss, stats = policy_loss(
        objective,
        own,
        known(batch.old_logprobs),
        policy.row,
        torch.from_numpy(np.concatenate([s.advantages for s in samples]).astype(np.float64))[policy.place],
        rows=len(samples),
        sampler_logprobs=known([s.logprobs for s in samples]),
        ref_logprobs=known(batch.ref_logprobs) if objective.beta > 0 else None,
    )
    weighted = token_loss * policy_weights(loss, samples)
    parts = [weighted.sum(), echo_loss(loss, samples, leaf)]
    (parts[0] + loss.echo_coefficient * parts[1]).backward()
    row_losses = np.zeros(len(samples))
    np.add.at(row_losses, policy.row.numpy(), weighted.detach().numpy())
    gradient = np.zeros(len(leaf)) if leaf.grad is None else leaf.grad.numpy()
    ends = np.cumsum([len(s.token_ids) for s in samples])[:-1]
    return StepTerms(parts[0].item(), parts[1].item(), stats, np.split(gradient, ends), row_losses)


def policy_weights(loss: StepLoss, samples: Sequence[Sample]) -> Tensor:
    """[N] float64: what each policy token counts in the step's loss."""
    policy = _Tokens.of(samples, [s.policy_mask for s in samples])
    return token_weights(
        loss.objective.loss,
        policy.row,
        policy.lengths,
        rows_total=loss.rows,
        tokens_total=loss.tokens_total,
        max_completion_length=loss.max_completion_length,
    )


def weighted_advantages(loss: StepLoss, samples: Sequence[Sample]) -> list[Array]:
    """[T] for each sample: the advantages times what each policy token counts; 0 for all other tokens."""
    weights = np.split(policy_weights(loss, samples).numpy(), np.cumsum([_count(s.policy_mask) for s in samples])[:-1])
    rows = [np.zeros(len(s.token_ids)) for s in samples]
    for row, sample, weight in zip(rows, samples, weights, strict=True):
        places = np.flatnonzero(_scored(sample.policy_mask))
        row[places] = sample.advantages[places] * weight
    return rows


def echo_loss(loss: StepLoss, samples: Sequence[Sample], logprobs: Tensor) -> Tensor:
    """The share of these samples in the cross-entropy on tool results, before its coefficient."""
    if not loss.echo_tokens:
        return logprobs.sum() * 0.0
    echo = _Tokens.of(samples, [s.echo_mask for s in samples])
    return world_model_loss(
        logprobs[echo.place],
        echo.row,
        echo.lengths,
        normalization=loss.echo_normalization,
        tokens_total=loss.echo_tokens,
        rows_total=loss.echo_rows,
        max_sequence_length=loss.longest_row,
    )


def echo_gradients(loss: StepLoss, samples: Sequence[Sample]) -> list[Array]:
    """[T] for each sample: the gradient of the ECHO term alone."""
    leaf = torch.zeros(sum(len(s.token_ids) for s in samples), dtype=torch.float64, requires_grad=True)
    (loss.echo_coefficient * echo_loss(loss, samples, leaf)).backward()
    assert leaf.grad is not None
    return np.split(leaf.grad.numpy(), np.cumsum([len(s.token_ids) for s in samples])[:-1])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a mask over samples that lie end to end."""

    place: Tensor  # [N] int64
    row: Tensor  # [N] int64
    lengths: Tensor  # [R] int64

    @classmethod
    def of(cls, samples: Sequence[Sample], masks: Sequence[Array]) -> _Tokens:
        scored = [_scored(mask) for mask in masks]
        lengths = np.array([mask.sum() for mask in scored], dtype=np.int64)
        place = np.flatnonzero(np.concatenate(scored))
        row = np.repeat(np.arange(len(samples)), lengths)
        return cls(torch.from_numpy(place), torch.from_numpy(row), torch.from_numpy(lengths))


def _scored(mask: Array) -> Array:
    """The mask without the first token, which nothing predicts."""
    return np.concatenate([[False], mask[1:]])


def _count(mask: Array) -> int:
    return int(mask[1:].sum())


def _all_known(samples: Sequence[Sample], rows: Sequence[Array]) -> bool:
    return all(bool(np.isfinite(row[_scored(s.policy_mask)]).all()) for s, row in zip(samples, rows, strict=True))
