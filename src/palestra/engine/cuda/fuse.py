"""Linear layers with one input run as one: q, k, v together, gate and up together.

Nothing is copied for good: the weights become views of one buffer, and the optimizer, which writes in
place, keeps it up to date. The module that trains is untouched; the fused ones stand in for the length
of an engine forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _First(nn.Module):
    """Computes the whole group, gives its own part, leaves the others' for them to take."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.rest: Tensor | None = None
        with torch.no_grad():
            self.weight = torch.cat([linear.weight for linear in linears])
            self.bias = torch.cat([linear.bias for linear in linears]) if linears[0].bias is not None else None
        self.claim(linears)

    def claim(self, linears: list[nn.Linear]) -> None:
        """Make the linears' parameters views of the fused ones (again, if somebody replaced them)."""
        for name, whole in (("weight", self.weight), ("bias", self.bias)):
            if whole is None:
                continue
            for linear, part in zip(linears, whole.split(self.sizes), strict=True):
                parameter = getattr(linear, name)
                if parameter.data_ptr() != part.data_ptr():
                    part.copy_(parameter.data)
                    parameter.data = part

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        self.rest = out
        return out[..., : self.sizes[0]]


class _Next(nn.Module):
    """The part of a group that starts at `start`."""

    def __init__(self, first: _First, start: int, size: int) -> None:
        super().__init__()
        self.__dict__["first"] = first  # not a submodule: it is the first one's own
        self.start, self.size = start, size

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.first.rest  # type: ignore[union-attr, assignment]
        return whole[..., self.start : self.start + self.size]


class FusedLinears:
    """Every group of plain linears in a model, and their stand-ins."""

    def __init__(self, model: nn.Module) -> None:
        self._groups: list[tuple[_First, list[nn.Linear]]] = []
        self._swaps: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for module in list(model.modules()):
            for names in GROUPS:
                linears = [module._modules.get(name) for name in names]
                if all(type(linear) is nn.Linear for linear in linears) and _alike(linears):  # type: ignore[arg-type]
                    self._add(module, names, linears)  # type: ignore[arg-type]

    def _add(self, parent: nn.Module, names: tuple[str, ...], linears: list[nn.Linear]) -> None:
        first = _First(linears)
        self._groups.append((first, linears))
        start = 0
        for name, linear in zip(names, linears, strict=True):
            stand_in = first if start == 0 else _Next(first, start, linear.out_features)
            self._swaps.append((parent, name, linear, stand_in))
            start += linear.out_features

    def claim(self) -> None:
        for first, linears in self._groups:
            first.claim(linears)

    def whole(self, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the group that a linear is the first of."""
        first = next(first for first, linears in self._groups if linears[0] is linear)
        return first.weight, first.bias

    @contextmanager
    def use(self) -> Iterator[None]:
        for parent, name, _, stand_in in self._swaps:
            parent._modules[name] = stand_in
        try:
            yield
        finally:
            for parent, name, linear, _ in self._swaps:
                parent._modules[name] = linear
            for first, _ in self._groups:
                first.rest = None


def _alike(linears: list[nn.Linear]) -> bool:
    kinds = {(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in linears}
    return len(kinds) == 1
