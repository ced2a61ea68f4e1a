"""One attention function for every model family; the step's plan says where the KV is.

Models reach it through transformers' AttentionInterface; `model(..., plan=plan)` hands the plan to
each layer. `AttentionSwitch` turns it on for the length of one forward, so that the same module can
train with another function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.core.errors import PalestraError

ENGINE_ATTENTION = "palestra_engine"


class UnsupportedModel(PalestraError):
    """A model that the paged engine cannot run; plain batched sampling can."""


class AttentionPlan(Protocol):
    """Where a step's KV goes and comes from."""

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """q [1, H, N, D], k and v [1, KV, N, D] of the step's N tokens -> [1, N, H, D]."""
        ...


def engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer."""
    if s_aux is not None:
        raise UnsupportedModel("attention sinks are not supported by the paged engine; sample with engine=plain")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module, query, key, value, scale, sliding_window, softcap), None


def register(name: str, function: Any) -> None:
    """Make an attention function known to transformers (no mask is built for it)."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)


class AttentionSwitch:
    """Runs a model with another attention function, in evaluation or training mode, and puts both back.

    It writes the few fields that matter directly, since a decode step lasts only milliseconds.
    """

    def __init__(self, model: nn.Module) -> None:
        configs: list[Any] = []
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal") and not any(config is c for c in configs):
                configs.append(config)
        self._configs = configs
        self._modules = list(model.modules())

    @contextmanager
    def use(self, name: str, training: bool) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        modes = [module.training for module in self._modules]
        for config in self._configs:
            config._attn_implementation_internal = name
        for module in self._modules:
            module.__dict__["training"] = training
        try:
            yield
        finally:
            for config, value in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = value
            for module, mode in zip(self._modules, modes, strict=True):
                module.__dict__["training"] = mode


def attend_rows(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attention of q [KV, G, Q, D] over k, v [KV, L, D]; `hidden` [Q, L] is added to the scores -> [Q, KV, G, D]."""
    heads, group, queries, dim = q.shape
    flat = q.reshape(1, heads, group * queries, dim)
    mask = hidden.repeat(group, 1)[None, None]
    if softcap is None:
        out = F.scaled_dot_product_attention(flat, k[None], v[None], attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(flat, k[None].transpose(-1, -2)).mul_(scale / softcap).tanh_().mul_(softcap)
        out = torch.matmul(scores.add_(mask).softmax(-1), v[None])
    return out.view(heads, group, queries, -1).permute(2, 0, 1, 3)
