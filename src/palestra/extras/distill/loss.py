"""Distillation: the divergence between student and teacher at each trained place, over candidate tokens.

The candidates of a place are the student's k most likely tokens. All other tokens are one more candidate, the tail,
whose probability is what the k leave: 1 − Σ p for the student and 1 − Σ q for the teacher. So mass that the teacher
gives to tokens outside of the student's k still counts, and the divergence of the k + 1 outcomes is a lower bound of
that of the whole distributions; with k = V it is exact. SDPO (arXiv 2601.20802) and TRL do the same.

    >>> student = torch.tensor([[0.7, 0.2], [0.5, 0.5]]).log()
    >>> divergence(student, student, "reverse_kl", tail=True).tolist()
    [0.0, 0.0]
    >>> teacher = torch.tensor([[0.2, 0.7]]).log()  # 10 % are the tail of both
    >>> round(divergence(student[:1], teacher, "reverse_kl", tail=True).item(), 4)  # 0.7 log(7/2) + 0.2 log(2/7)
    0.6264
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import TokenStats
from palestra.algo.step_loss import Loss, LossTerms, LossTokens
from palestra.core.types import Array

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

TEACHER, WEIGHT = "teacher_logprobs", "place_weight"  # input columns of the targets
LOWEST_LOGPROB = -30.0  # of a teacher, so that a token that it rules out gives a finite loss
LOWEST_TAIL = 1e-7  # about the rounding error of a float32 sum of probabilities


@dataclass(frozen=True, slots=True)
class DistillLoss(Loss):
    """coefficient · Σ place_weight · divergence / places_total, over targets with `candidates` tokens at each place.

    The gradient goes through the student's probabilities of the candidates; the teacher's are constants.
    """

    divergence: Divergence
    candidates: int
    places_total: float  # what the sum is divided by: the trained tokens of the optimizer step
    coefficient: float = 1.0
    tail: bool = True  # False where the candidates are the whole vocabulary

    @property
    def weights(self) -> tuple[float, ...]:  # type: ignore[override]
        return (self.coefficient,)

    def __call__(self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        student, teacher, weight = (
            x.view(-1, self.candidates) for x in (logprobs, tokens.inputs[TEACHER], tokens.inputs[WEIGHT])
        )
        values = divergence(student, teacher, self.divergence, tail=self.tail)  # [places]
        losses = weight[:, 0] * values
        known = {"distill_divergence": values, "distill_weight": weight[:, 0]}
        stats = TokenStats(len(values), {name: x.detach().sum(dtype=torch.float64) for name, x in known.items()})
        total = losses.sum() / max(self.places_total, 1.0)
        return LossTerms(total[None], losses.detach(), tokens.row[:: self.candidates], stats)

    def has_gradient(self, batch: Batch, at: Array) -> bool:
        assert batch.targets is not None
        return bool(np.any(batch.targets.inputs[WEIGHT][at]))

    def metrics(self, terms: Tensor, stats: TokenStats) -> dict[str, float]:
        loss = self.coefficient * float(terms[0].detach())
        return {"loss": loss, "distill_loss": loss, "tokens_distilled": float(stats.tokens)} | stats.finish()


def divergence(student: Tensor, teacher: Tensor, kind: Divergence, *, tail: bool) -> Tensor:
    """[P] divergences of the distributions that these [P, k] log-probabilities of the same tokens are from.

    `reverse_kl` is KL(student ‖ teacher), `forward_kl` KL(teacher ‖ student), `jsd` the mean of both against their
    mixture. `tail` adds the remaining tokens as one.
    """
    p, q = student, teacher.clamp(min=LOWEST_LOGPROB)
    if tail:
        p, q = (torch.cat([x, log_tail(x)], dim=-1) for x in (p, q))
    match kind:
        case "reverse_kl":
            return _kl(p, q)
        case "forward_kl":
            return _kl(q, p)
        case "jsd":
            mixture = torch.logaddexp(p, q) - math.log(2)
            return (_kl(p, mixture) + _kl(q, mixture)) / 2


def log_tail(logprobs: Tensor) -> Tensor:
    """[P, 1] log-probability of all tokens but these [P, k]."""
    left = -torch.expm1(logprobs.logsumexp(-1, keepdim=True).clamp(max=0.0))
    return left.clamp(min=LOWEST_TAIL).log()


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)
