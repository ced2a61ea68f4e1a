"""ECHO: also learn to predict what the tools answer (arXiv 2605.24517).

Cross-entropy over the bodies of tool results, flat: N observed tokens of R rows. The term has its
own denominators, given by the caller, so it never dilutes the policy term and micro-batches add up.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from palestra.core.errors import PalestraError

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
        case _:
            raise PalestraError(
                f"unknown echo normalization {normalization!r}; "
                "expected selected_tokens, sequence_mean or seq_mean_token_sum_norm"
            )
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
                raise PalestraError("a linear echo schedule needs the number of steps, got None; set max_steps")
            done = min(step / max(steps_total - 1, 1), 1.0)
            return initial + (final - initial) * done
        case "step":
            return max(initial * 0.5 ** (step // step_every), min(final, initial))
    raise PalestraError(f"unknown echo schedule {schedule!r}; expected constant, linear or step")
