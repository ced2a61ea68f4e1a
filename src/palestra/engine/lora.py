"""peft's low-rank adapters as the fast decoders need them: a layer's own weight, and what its adapter adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PEFT_LINEAR = ("peft.tuners.lora.layer", "Linear")


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter of one linear layer: it adds `scaling * up @ down @ x`."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r]
    scaling: float


def base_model(model: Any) -> Any:
    """The decoder inside of peft's wrapper; its linear layers are still the adapted ones."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_linear(linear: Any) -> Any:
    return getattr(linear, "base_layer", linear)


def is_linear(linear: Any) -> bool:
    """An nn.Linear, bare or with one ordinary LoRA adapter: not merged, not quantised, no variant such as DoRA."""
    if type(base_linear(linear)) is not nn.Linear:
        return False
    if linear is base_linear(linear):
        return True
    is_ordinary = any((t.__module__, t.__name__) == PEFT_LINEAR for t in type(linear).__mro__[:2])  # or the learner's
    if not is_ordinary or linear.merged or linear.disable_adapters or len(linear.active_adapters) != 1:
        return False
    name = linear.active_adapters[0]
    if name not in linear.lora_A:
        return False
    variant = getattr(linear, "lora_variant", {}).get(name) or getattr(linear, "use_dora", {}).get(name)
    return not variant and not linear.fan_in_fan_out and linear.lora_B[name].bias is None


def adapter_of(linear: Any) -> LowRank | None:
    if linear is base_linear(linear):
        return None
    name = linear.active_adapters[0]
    return LowRank(linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name])


def merged_weight(linear: Any) -> Tensor:
    """The weight [out, in] with the adapter added to it."""
    weight: Tensor = base_linear(linear).weight
    adapter = adapter_of(linear)
    return weight if adapter is None else torch.addmm(weight, adapter.up, adapter.down, alpha=adapter.scaling)


class FusedAdapter:
    """The adapters of linear layers with one input as two small products, in the dtype of the layers.

    Its buffers stay where they are, because captured graphs read them: `refresh` copies the adapters' weights anew.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._adapters = [adapter_of(linear) for linear in linears]
        self._outputs = [base_linear(linear).out_features for linear in linears]
        ranks = sum(len(adapter.down) for adapter in self._adapters if adapter is not None)
        weight = base_linear(linears[0]).weight
        padded = -(-ranks // 8) * 8  # matrix products want rows of 16 bytes
        self.down = torch.zeros(padded, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self.up = torch.zeros(sum(self._outputs), padded, dtype=weight.dtype, device=weight.device)
        self.refresh()

    @classmethod
    def of(cls, linears: Sequence[Any]) -> FusedAdapter | None:
        return cls(linears) if any(adapter_of(linear) is not None for linear in linears) else None

    @torch.no_grad()
    def refresh(self) -> None:
        row = rank = 0
        for adapter, outputs in zip(self._adapters, self._outputs, strict=True):
            if adapter is not None:
                r = len(adapter.down)
                self.down[rank : rank + r].copy_(adapter.down)
                self.up[row : row + outputs, rank : rank + r].copy_(adapter.up * adapter.scaling)
                rank += r
            row += outputs

    def add(self, out: Tensor, x: Tensor) -> None:
        """out += what the adapters make of x."""
        out.addmm_(x @ self.down.T, self.up.T)
