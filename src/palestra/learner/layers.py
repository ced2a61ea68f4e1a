"""The layers of a decoder."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_layers(model: Any) -> list[nn.Module]:
    """All of one make, so that one compiled program serves them all."""
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    return max((list(stack) for stack in stacks), key=len, default=[])
