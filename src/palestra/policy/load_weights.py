"""Weights into the module that a policy samples from."""

from __future__ import annotations

from typing import Any

import torch

from palestra.core.errors import PalestraError
from palestra.core.weights import Weights


@torch.no_grad()
def load_weights(model: Any, weights: Weights) -> None:
    """Copy the tensors by name; nothing to do where the learner trains this module itself."""
    if weights.module is model:
        return
    own = dict(model.named_parameters())
    tensors = weights.tensors()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            has = f"has the shape {list(own[name].shape)}" if name in own else "is missing"
            raise PalestraError(
                f"version {weights.version} brings {name} of shape {list(tensor.shape)}, which {has} here; "
                "learner and policy must load the same model, with the same lora settings"
            )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
