"""A loss as a function of scored tokens, and the loss of one optimizer step: formula, coefficients and normalisers.

Whoever computes gradients needs no more than this and some of the step's rows: the shares of all parts add up to
the same loss and the same gradient, however the rows are split over calls, micro-batches or processes.

    >>> from palestra.core.types import Sample
    >>> mask = (False, True, True)
    >>> rows = [Sample((1, 2, 3), mask, (False,) * 3, (0.0, -0.1, -0.2), advantages=1.0) for _ in range(4)]
    >>> loss = StepLoss.of(Batch.of(rows), Objective(loss="dapo"), max_completion_length=8)
    >>> loss.rows, loss.policy_tokens
    (4, 8)

ECHO (arXiv 2605.24517) also learns to predict what the tools answer: cross-entropy over the bodies of tool results. It
has its own denominators, so that it never dilutes the policy term and micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective, TokenStats, policy_loss, token_weights
from palestra.core.errors import SettingError
from palestra.core.types import Array

ENTROPY_INCREMENT = 0.005  # by which the controller moves the coefficient, between 0 and 1

# (log-probabilities, entropies, which tokens) -> the gradient of the loss by each of both
LossGradient = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class LossTokens:
    """What a loss reads of N scored tokens, apart from the model's log-probabilities and entropies of them."""

    rows: int  # of the batch
    row: Tensor  # [N] int64
    inputs: Mapping[str, Tensor]  # [N] columns of the batch, by name
    policy: Tensor | None = None  # indices of the tokens that count in the policy loss; None: all
    echo: Tensor | None = None  # indices of the tokens that count in the ECHO term
    policy_lengths: Tensor | None = None  # [rows] policy tokens of each row
    echo_lengths: Tensor | None = None  # [rows]

    def select(self, tokens: Tensor | slice) -> LossTokens:
        inputs = {name: column[tokens] for name, column in self.inputs.items()}
        return replace(self, row=self.row[tokens], inputs=inputs, policy=None)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of some tokens, as terms that are weighed by `Loss.weights` and added."""

    terms: Tensor  # [K], with their gradient
    token_losses: Tensor  # [n] detached
    row: Tensor  # [n] the row of each
    stats: TokenStats


class Loss:
    """A sum over tokens or rows that `Learner.forward_backward` takes. Subclasses are frozen dataclasses."""

    weights: tuple[float, ...] = (1.0,)  # of the terms
    scores_echo: bool = False  # whether the tokens of `echo_mask` are scored, too
    entropy_gradient: bool = False
    temperature: float | None = None  # by which logits are divided; None: as the tokens were sampled

    def __call__(self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        """The share of these tokens in the loss; `entropy` is None where it is unknown."""
        raise NotImplementedError

    def gradient(self, tokens: LossTokens) -> LossGradient | None:
        """The gradient of the loss by parts of the tokens, where it is a sum over tokens."""
        return None

    def has_gradient(self, batch: Batch, at: Array) -> bool:
        """False if the gradient of the tokens at these places is known to be 0, so that no backward pass is needed."""
        return True

    def metrics(self, terms: Tensor, stats: TokenStats) -> dict[str, float]:
        values = terms.tolist()
        return {"loss": sum(w * value for w, value in zip(self.weights, values, strict=True))} | stats.finish()


@dataclass(frozen=True, slots=True)
class StepLoss(Loss):
    """policy loss + echo_coefficient · cross-entropy on tool results − entropy_coefficient · mean entropy."""

    objective: Objective
    rows: int  # of the whole step, also those without trained tokens, but not those that only ECHO learns from
    policy_tokens: int
    tokens_total: float  # what token-mean losses divide by
    max_completion_length: int
    entropy_coefficient: float = 0.0
    echo_coefficient: float = 0.0
    echo_normalization: Normalization = "selected_tokens"
    echo_tokens: int = 0
    echo_rows: int = 0
    longest_row: int = 0

    @classmethod
    def of(
        cls,
        batch: Batch,
        objective: Objective,
        *,
        max_completion_length: int,
        entropy_coefficient: float = 0.0,
        echo_coefficient: float = 0.0,
        echo_normalization: Normalization = "selected_tokens",
    ) -> StepLoss:
        """The loss of a step on these rows."""
        policy_tokens = int(np.count_nonzero(batch.predicted(batch.policy_mask)))
        echo = batch.count(batch.predicted(batch.echo_mask)) if echo_coefficient else np.zeros(0, int)
        has_policy, has_echo = batch.count(batch.policy_mask) > 0, batch.count(batch.echo_mask) > 0
        return cls(
            objective=objective,
            rows=int(np.count_nonzero(has_policy | ~has_echo)),
            policy_tokens=policy_tokens,
            tokens_total=policy_tokens,
            max_completion_length=max_completion_length,
            entropy_coefficient=entropy_coefficient,
            echo_coefficient=echo_coefficient,
            echo_normalization=echo_normalization,
            echo_tokens=int(echo.sum()),
            echo_rows=int(np.count_nonzero(echo)),
            longest_row=int(batch.lengths.max(initial=0)),
        )

    @property
    def weights(self) -> tuple[float, ...]:  # type: ignore[override]
        """Of policy loss, cross-entropy on tool results and entropy bonus."""
        return 1.0, self.echo_coefficient, 1.0

    @property
    def scores_echo(self) -> bool:  # type: ignore[override]
        return self.echo_coefficient > 0

    @property
    def entropy_gradient(self) -> bool:  # type: ignore[override]
        return self.entropy_coefficient != 0.0

    @property
    def temperature(self) -> float | None:  # type: ignore[override]
        return 1.0 if self.objective.loss == "cross_entropy" else None

    def __call__(self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        policy, own, spread = tokens, logprobs, entropy
        if tokens.policy is not None:
            policy, own = tokens.select(tokens.policy), logprobs[tokens.policy]
            spread = None if entropy is None else entropy[tokens.policy]
        (policy_term, bonus), losses, stats = self.policy_terms(policy, own, spread)
        echo = self.echo_term(tokens, logprobs) if self.echo_tokens else torch.zeros_like(bonus)
        return LossTerms(torch.stack([policy_term, echo, bonus]), losses, policy.row, stats)

    def policy_terms(
        self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, TokenStats]:
        """([2] loss and bonus, [N] loss of each token, what to report); unknown logprobs count as the policy's own."""
        objective, inputs, known = self.objective, tokens.inputs, logprobs.detach()
        sampler, old = inputs["logprobs"], inputs.get("old_logprobs")
        sampler = torch.where(sampler.isnan(), known, sampler)
        old = None if old is None else torch.where(old.isnan(), known, old)
        token_loss, stats = policy_loss(
            objective,
            logprobs,
            old,
            tokens.row,
            inputs["advantages"],
            rows=tokens.rows,
            sampler_logprobs=sampler,
            ref_logprobs=inputs.get("ref_logprobs") if objective.beta > 0 else None,
            entropy=entropy,
        )
        policy = (token_loss * self.token_weights(tokens).to(token_loss.dtype)).sum()
        bonus = torch.zeros_like(policy)
        if self.entropy_coefficient and entropy is not None:
            bonus = entropy_bonus(entropy, self.entropy_coefficient, tokens_total=self.policy_tokens)
        return torch.stack([policy, bonus]), token_loss.detach(), stats

    def token_weights(self, tokens: LossTokens) -> Tensor:
        """[N] float64: what each policy token counts in the step's loss."""
        assert tokens.policy_lengths is not None
        return token_weights(
            self.objective.loss,
            tokens.row,
            tokens.policy_lengths,
            rows_total=self.rows,
            tokens_total=self.tokens_total,
            max_completion_length=self.max_completion_length,
        )

    def echo_term(self, tokens: LossTokens, logprobs: Tensor) -> Tensor:
        """The share of these tokens in the cross-entropy on tool results, before its coefficient."""
        assert tokens.echo is not None
        assert tokens.echo_lengths is not None
        return world_model_loss(
            logprobs[tokens.echo],
            tokens.row[tokens.echo],
            tokens.echo_lengths,
            normalization=self.echo_normalization,
            tokens_total=self.echo_tokens,
            rows_total=self.echo_rows,
            max_sequence_length=self.longest_row,
        )

    def gradient(self, tokens: LossTokens) -> LossGradient | None:
        if tokens.policy is not None or not self.objective.is_sum_over_tokens:
            return None
        return partial(self._gradient, tokens)

    def _gradient(self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            own, spread = (x.detach().requires_grad_() for x in (logprobs, entropy))
            total = self.policy_terms(tokens.select(part), own, spread)[0].sum()
            by_own, by_spread = torch.autograd.grad(total, (own, spread), allow_unused=True, materialize_grads=True)
        return by_own, by_spread

    def metrics(self, terms: Tensor, stats: TokenStats) -> dict[str, float]:
        policy, echo, bonus = terms.tolist()
        metrics = {"loss": policy + self.echo_coefficient * echo + bonus, "policy_loss": policy}
        if self.echo_tokens:
            metrics["echo_loss"] = echo
        return metrics | stats.finish()


Normalization = Literal["selected_tokens", "sequence_mean", "seq_mean_token_sum_norm"]
Schedule = Literal["constant", "linear", "step"]


def world_model_loss(
    logprobs: Tensor,  # [N] of the observed tokens
    row: Tensor,  # [N] int64
    row_lengths: Tensor,  # [R] observed tokens of each row of this micro-batch
    *,
    normalization: Normalization,
    tokens_total: int,
    rows_total: int,
    max_sequence_length: int,
) -> Tensor:
    """This micro-batch's share of the step's cross-entropy on tool results; 0 with a live graph if there are none.

    `tokens_total` counts the observed tokens of the step, `rows_total` its rows that have any, and
    `max_sequence_length` is its longest row.
    """
    match normalization:
        case "selected_tokens":
            weight: Tensor | float = 1.0 / max(tokens_total, 1)
        case "sequence_mean":
            weight = 1.0 / (row_lengths.to(logprobs.dtype).clamp(min=1.0)[row] * max(rows_total, 1))
        case "seq_mean_token_sum_norm":
            weight = 1.0 / max(max_sequence_length, 1)
    return -(logprobs * weight).sum()


def coefficient_at(
    step: int,
    *,
    schedule: Schedule,
    initial: float,
    final: float = 0.0,
    steps_total: int | None = None,
    step_every: int = 10,
) -> float:
    """λ at a step counted from 0.

    `linear` reaches `final` on the last of `steps_total` steps; `step` halves after every
    `step_every` steps and never falls below `final`.
    """
    match schedule:
        case "constant":
            return initial
        case "linear":
            if steps_total is None:
                raise SettingError("a linear echo schedule needs the number of steps, got None; set max_steps")
            done = min(step / max(steps_total - 1, 1), 1.0)
            return initial + (final - initial) * done
        case "step":
            return max(initial * 0.5 ** (step // step_every), min(final, initial))


def entropy_bonus(entropy: Tensor, coefficient: float, *, tokens_total: int) -> Tensor:
    """−c · the mean entropy of the step's trained tokens, to be added to the loss of each micro-batch.

    Its denominator is the token count whatever the policy's reduction is, so that a coefficient
    means the same with every loss.
    """
    return entropy.sum() * (-coefficient / max(tokens_total, 1))


def next_entropy_coefficient(coefficient: float, entropy: float, target: float) -> float:
    """The coefficient for the next step: one increment up while entropy is at or below the target, else one down."""
    if entropy <= target:
        return min(coefficient + ENTROPY_INCREMENT, 1.0)
    return max(coefficient - ENTROPY_INCREMENT, 0.0)
