"""RMS norms in fewer calls and passes, where that gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from palestra.engine.supported import is_standard_rms_norm, norm_epsilon


class FastNorms:
    """The model's RMS norms with quicker ones in their place for a while.

    Families write the norm differently (some scale by 1 + weight), so each class is compared first.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm") and norm_epsilon(m) is not None]
        first = {type(m): m for m in reversed(found)}
        standard = {kind for kind, norm in first.items() if is_standard_rms_norm(norm)}
        self._stand_ins = [(m, _trained(m)) for m in found if type(m) in standard]

    @contextmanager
    def use(self) -> Iterator[None]:
        for module, stand_in in self._stand_ins:
            module.__dict__["forward"] = stand_in
        try:
            yield
        finally:
            for module, _ in self._stand_ins:
                del module.__dict__["forward"]


def _trained(module: nn.Module) -> Callable[[Tensor], Tensor]:
    epsilon = norm_epsilon(module)
    return lambda x: _RmsNorm.apply(x, module.weight, epsilon)


class _RmsNorm(torch.autograd.Function):
    """The norm with its gradient written out: a third of the passes over memory that its formula makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = length.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, inverse, weight = ctx.saved_tensors
        grad = grads[0]
        along = grad * normed
        mean = torch.matmul(along, weight).div_(len(weight)).unsqueeze_(-1)
        grad_x = (grad * weight).addcmul_(normed, mean, value=-1.0).mul_(inverse)
        return grad_x, along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None
