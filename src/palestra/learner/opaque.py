"""What compiled layers call without looking into it: code that walks trees, which differ in every micro-batch.

Such code is a custom operation. Compiled programs know objects by a number in a tensor, so that another object is no
reason to compile again. The gradient comes from autograd, which computes the operation again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

T = TypeVar("T")
# Dispatch keys that an operation's own code does not pass through, and autograd needs.
AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")


class Registry(Generic[T]):
    """Living objects by their number."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers = count()

    def add(self, item: T) -> Tensor:
        """The handle of the item; whoever runs a forward and backward pass keeps the item."""
        number = next(self._numbers)
        self._alive[number] = item
        return torch.tensor(number)

    def __getitem__(self, handle: Tensor) -> T:
        return self._alive[int(handle)]


def gradients(
    compute: Callable[..., Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """The gradients by inputs and weights of `compute(*inputs)`, whose code uses the weights; zeros where unused."""
    with _autograd():
        own = [x.detach().requires_grad_() for x in inputs]
        found = torch.autograd.grad(compute(*own), [*own, *weights], grad, allow_unused=True)
    pairs = zip(found, (*inputs, *weights), strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x in pairs]


@contextmanager
def _autograd() -> Iterator[None]:
    """Record operations inside of a custom operation, whose code runs below autograd."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in AUTOGRAD:
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield
