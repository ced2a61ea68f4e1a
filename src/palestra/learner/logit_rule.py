"""What a model does to its logits after the output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogitRule:
    """How a model makes its final logits: softcap(multiplier · (W h + b)), then divided by the temperature."""

    multiplier: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0


def logit_rule(model: Any, temperature: float) -> LogitRule:
    """What the model does to its logits after the output layer; temperature 0 trains at 1."""
    config = model.config
    multiplier = 1.0
    if scaling := getattr(config, "logits_scaling", None):
        multiplier = 1.0 / scaling
    elif scale := getattr(config, "logit_scale", None):
        multiplier = float(scale)
    return LogitRule(multiplier, getattr(config, "final_logit_softcapping", None), temperature or 1.0)
