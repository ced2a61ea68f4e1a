"""Tinker's losses as pure functions: sums over tokens, without a mean; the client normalises.

    >>> lp = torch.tensor([-0.5, -0.1], requires_grad=True)
    >>> given = {"logprobs": torch.tensor([-0.4, -0.2]), "advantages": torch.tensor([1.0, -1.0])}
    >>> token_losses("importance_sampling", {}, lp, given).sum().item()
    0.2003...

`thresholds` are bounds of the ratio itself: 0.8 and 1.2 keep it within 20 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import TokenStats, row_sum
from palestra.algo.step_loss import Loss, LossTerms, LossTokens
from palestra.core.errors import SettingError, UnsupportedError, did_you_mean
from palestra.core.types import Array

_SAMPLED = ("logprobs", "advantages")
INPUTS = {  # beside target_tokens
    "cross_entropy": ("weights",),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "gspo": (*_SAMPLED, "sequence_ratio_mask"),
    "dro": _SAMPLED,
}
# Each token's loss, and so its gradient, is a multiple of this input (dro has a term beside it).
SCALED_BY = {name: "weights" if name == "cross_entropy" else "advantages" for name in INPUTS if name != "dro"}
_CLIP = ("clip_low_threshold", "clip_high_threshold")
SETTINGS = {"ppo": dict(zip(_CLIP, (0.8, 1.2), strict=True)), "cispo": dict(zip(_CLIP, (0.0, 4.0), strict=True))}
NEEDED = {"gspo": _CLIP, "dro": ("beta",)}  # settings whose defaults at the hosted service are not published


def check_loss(loss_fn: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss with their defaults; raises for an unknown loss or setting."""
    if loss_fn not in INPUTS:
        known = ", ".join(INPUTS)
        raise UnsupportedError(
            f"loss_fn {loss_fn!r} is not served here; use one of {known}, or forward_backward_custom."
            f"{did_you_mean(loss_fn, INPUTS)}"
        )
    defaults, needed = SETTINGS.get(loss_fn, {}), NEEDED.get(loss_fn, ())
    for key, value in config.items():
        if key not in defaults and key not in needed:
            knows = ", ".join([*defaults, *needed]) or "none"
            raise SettingError(f"{loss_fn} has no setting {key!r} in loss_fn_config; it has {knows}")
        if not isinstance(value, float | int) or value != value:
            raise SettingError(f"loss_fn_config[{key!r}] of {loss_fn} is {value!r}; expected a number")
    for key in needed:
        if key not in config:
            raise SettingError(f"{loss_fn} needs loss_fn_config[{key!r}] here: its default is not published")
    return {**defaults, **{key: float(value) for key, value in config.items()}}


@dataclass(frozen=True, slots=True)
class TinkerLoss(Loss):
    """One of these losses over a batch's targets, with the settings that `check_loss` returns."""

    name: str
    settings: Mapping[str, float]

    def __call__(self, tokens: LossTokens, logprobs: Tensor, entropy: Tensor | None) -> LossTerms:
        losses = token_losses(self.name, self.settings, logprobs, tokens.inputs, tokens.row)
        return LossTerms(losses.sum()[None], losses.detach(), tokens.row, TokenStats())

    def has_gradient(self, batch: Batch, at: Array) -> bool:
        """False where all advantages (or weights) are 0, as those of a group with equal rewards."""
        assert batch.targets is not None
        counts = SCALED_BY.get(self.name)
        return counts is None or bool(np.any(batch.targets.inputs[counts][at]))


def token_losses(
    loss_fn: str,
    settings: Mapping[str, float],
    logprobs: Tensor,  # [N]
    inputs: Mapping[str, Tensor],  # [N] each
    row: Tensor | None = None,  # [N] int64, for losses that look at whole rows
) -> Tensor:
    """[N] the loss of each target, to be summed."""
    if loss_fn == "cross_entropy":
        return -inputs["weights"] * logprobs
    advantages, log_ratio = inputs["advantages"], logprobs - inputs["logprobs"]
    match loss_fn:
        case "importance_sampling":
            return -log_ratio.exp() * advantages
        case "ppo":
            return _clipped(log_ratio.exp(), advantages, settings)
        case "cispo":
            return -log_ratio.exp().clamp(*(settings[key] for key in _CLIP)).detach() * logprobs * advantages
        case "gspo":
            assert row is not None
            # [N] the mean of each row's masked values; 0 in a row without any.
            values = log_ratio.detach()
            mask = inputs["sequence_ratio_mask"] != 0
            rows = int(row.max()) + 1 if len(row) else 0
            total, count = row_sum(values * mask, row, rows), row_sum(mask.to(values.dtype), row, rows)
            mean = (total / count.clamp(min=1.0))[row]
            return _clipped((mean + logprobs - logprobs.detach()).exp(), advantages, settings)
        case "dro":
            return -(logprobs * advantages - 0.5 * settings["beta"] * log_ratio.square())
    raise SettingError(f"loss_fn {loss_fn!r} is unknown")


def _clipped(ratio: Tensor, advantages: Tensor, settings: Mapping[str, float]) -> Tensor:
    low, high = (settings[key] for key in _CLIP)
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
