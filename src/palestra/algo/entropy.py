"""The entropy bonus, and a controller that steers its coefficient towards a target entropy."""

from __future__ import annotations

from torch import Tensor


def entropy_bonus(entropy: Tensor, coefficient: float, *, tokens_total: int) -> Tensor:
    """−c · the mean entropy of the step's trained tokens, to be added to the loss of each micro-batch.

    Its denominator is the token count whatever the policy's reduction is, so that a coefficient
    means the same with every loss.
    """
    return entropy.sum() * (-coefficient / max(tokens_total, 1))


def next_entropy_coefficient(
    coefficient: float,
    entropy: float,
    target: float,
    *,
    increment: float = 0.005,
    lowest: float = 0.0,
    highest: float = 1.0,
) -> float:
    """The coefficient for the next step: one increment up while entropy is at or below the target, else one down."""
    if entropy <= target:
        return min(coefficient + increment, highest)
    return max(coefficient - increment, lowest)
