"""A module to sample from that stays at its version while the learner trains on."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def sampling_copy(model: Model) -> Model:
    """The model with its frozen parameters shared and its trainable ones copied.

    A policy on the copy goes on sampling the weights of now; `policy.update(learner.weights(…))` brings newer ones.
    With LoRA only the adapters are held twice.

    >>> policy = LocalPolicy(sampling_copy(model))    # doctest: +SKIP
    """
    frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    copied = copy.deepcopy(model, frozen)
    return copied.eval().requires_grad_(False)
