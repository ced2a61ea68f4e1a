"""The policy's part of the loss of a micro-batch, as a function of what the model makes of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.algo.entropy import entropy_bonus
from palestra.algo.losses import TokenStats, policy_loss, token_weights
from palestra.algo.step_loss import StepLoss


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Policy loss and entropy bonus of [N] tokens, or of some of them where the loss is a sum over tokens."""

    loss: StepLoss
    rows: int  # of the batch
    row: Tensor  # [N]
    row_lengths: Tensor  # [rows] policy tokens of each
    advantages: Tensor  # [N]
    sampler_logprobs: Tensor  # [N], NaN where not known
    old_logprobs: Tensor | None  # [N], NaN likewise
    ref_logprobs: Tensor | None  # [N]

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, part: slice = slice(None)
    ) -> tuple[Tensor, Tensor, TokenStats]:
        """([2] loss and bonus, [N] loss of each token, what to report); unknown logprobs count as the policy's own."""
        loss, objective, row = self.loss, self.loss.objective, self.row[part]
        sampler, old = (
            None if x is None else torch.where(x[part].isnan(), logprobs.detach(), x[part])
            for x in (self.sampler_logprobs, self.old_logprobs)
        )
        token_loss, stats = policy_loss(
            objective,
            logprobs,
            old,
            row,
            self.advantages[part],
            rows=self.rows,
            sampler_logprobs=sampler,
            ref_logprobs=self.ref_logprobs[part] if self.ref_logprobs is not None and objective.beta > 0 else None,
            entropy=entropy,
        )
        weights = token_weights(
            objective.loss,
            row,
            self.row_lengths,
            rows_total=loss.rows,
            tokens_total=loss.tokens_total,
            max_completion_length=loss.max_completion_length,
        )
        policy = (token_loss * weights.to(token_loss.dtype)).sum()
        bonus = torch.zeros_like(policy)
        if loss.entropy_coefficient:
            bonus = entropy_bonus(entropy, loss.entropy_coefficient, tokens_total=loss.policy_tokens)
        return torch.stack([policy, bonus]), token_loss.detach(), stats

    def gradient(self, logprobs: Tensor, entropy: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Of both by the log-probabilities and entropies of these tokens; right where the loss is a sum over tokens."""
        with torch.enable_grad():
            own, spread = (x.detach().requires_grad_() for x in (logprobs, entropy))
            total = self(own, spread, part)[0].sum()
            by_own, by_spread = torch.autograd.grad(total, (own, spread), allow_unused=True, materialize_grads=True)
        return by_own, by_spread
