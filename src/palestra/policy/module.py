"""Functions on the module that a policy samples from: load weights, copy it, score tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from palestra.core.errors import SettingError
from palestra.core.weights import Weights
from palestra.engine.attention import plain_forward
from palestra.policy.base import TokenLogprobs


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
            raise SettingError(
                f"version {weights.version} brings {name} of shape {list(tensor.shape)}, which {has} here; "
                "learner and policy must load the same model, with the same lora settings"
            )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


Model = TypeVar("Model", bound=nn.Module)


def sampling_copy(model: Model) -> Model:
    """The model with its frozen parameters shared and its trainable ones copied.

    A policy on the copy samples the current weights until `policy.update(learner.weights(…))` brings newer ones.
    With LoRA only the adapters are held twice.

    >>> policy = LocalPolicy(sampling_copy(model))    # doctest: +SKIP
    """
    frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    copied = copy.deepcopy(model, frozen)
    return copied.eval().requires_grad_(False)


_CHUNK = 512  # tokens whose logits are held at once


def token_logprobs(
    model: Any, token_ids: Sequence[int], start: int, *, top: int = 0, temperature: float = 1.0
) -> Iterator[TokenLogprobs]:
    """The tokens from place `start` (1 or more) on, given all before them; a piece after each chunk of work."""
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    cache = None
    for begin in range(0, ids.shape[1] - 1, _CHUNK):
        end = min(begin + _CHUNK, ids.shape[1] - 1)
        scored = end - max(begin, start - 1)  # the last of the chunk predict them
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": max(scored, 1)}
        out = plain_forward(model, ids[:, begin:end], **options)
        cache = out.past_key_values
        if scored > 0:
            yield _read(out.logits[0] / temperature, ids[0, end + 1 - scored : end + 1], top)


def _read(logits: Tensor, tokens: Tensor, top: int) -> TokenLogprobs:
    """What logits [T, V] say of the tokens [T]."""
    logprobs = logits.float().log_softmax(-1)
    values, best = logprobs.topk(min(top, logprobs.shape[1]))
    pairs = [list(zip(i, v, strict=True)) for i, v in zip(best.tolist(), values.tolist(), strict=True)]
    return TokenLogprobs(logprobs.gather(1, tokens[:, None])[:, 0].tolist(), pairs)
