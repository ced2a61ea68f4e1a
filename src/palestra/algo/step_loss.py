"""The loss of one optimizer step as numbers: formula, coefficients and normalisers.

Whoever computes gradients needs no more than this and some of the step's rows: the shares of all parts add up to
the same loss and the same gradient, however the rows are split over calls, micro-batches or processes.

    >>> mask = (False, True, True)
    >>> rows = [Sample((1, 2, 3), mask, (False,) * 3, (0.0, -0.1, -0.2), advantages=1.0) for _ in range(4)]
    >>> loss = StepLoss.of(rows, Objective(loss="dapo"), max_completion_length=8)
    >>> loss.rows, loss.policy_tokens
    (4, 8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from palestra.algo.echo import Normalization
from palestra.algo.losses import Objective
from palestra.core.types import Sample


@dataclass(frozen=True, slots=True)
class StepLoss:
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
        samples: Sequence[Sample],
        objective: Objective,
        *,
        max_completion_length: int,
        entropy_coefficient: float = 0.0,
        echo_coefficient: float = 0.0,
        echo_normalization: Normalization = "selected_tokens",
    ) -> StepLoss:
        """The loss of a step on these samples."""
        policy_tokens = sum(int(np.count_nonzero(s.policy_mask[1:])) for s in samples)
        echo = [int(np.count_nonzero(s.echo_mask[1:])) for s in samples] if echo_coefficient else []
        return cls(
            objective=objective,
            rows=sum(bool(s.policy_mask.any() or not s.echo_mask.any()) for s in samples),
            policy_tokens=policy_tokens,
            tokens_total=policy_tokens,
            max_completion_length=max_completion_length,
            entropy_coefficient=entropy_coefficient,
            echo_coefficient=echo_coefficient,
            echo_normalization=echo_normalization,
            echo_tokens=sum(echo),
            echo_rows=sum(n > 0 for n in echo),
            longest_row=max((len(s.token_ids) for s in samples), default=0),
        )
