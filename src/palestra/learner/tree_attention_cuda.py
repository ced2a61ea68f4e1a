"""Tree attention by two flash-attention calls: each token to its own run, and completions to their prompt.

Both halves are partial softmaxes over disjoint keys; they are merged by their log-sum-exps. The
backward pass gives each half the merged output and log-sum-exp, which makes its gradients exact, so
neither a mask nor a second copy of the prompt's keys ever exists.

Tokens come with the prompts first, so that both halves read slices: to pick them out of every tensor in every
layer takes more launches than all else, and small models wait for launches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Tree, ragged_arange
from palestra.core.machine import in_one_order, to_device
from palestra.core.types import Array
from palestra.learner.shapes import NO_PADDING, Lengths, Shapes

HALF = (torch.bfloat16, torch.float16)
Half = tuple[Tensor, Tensor, int, int, bool]  # query bounds, key bounds, the longest of each, causal


_alive: WeakValueDictionary[int, Bounds] = WeakValueDictionary()
_handles = count()


class Bounds:
    """Where the two halves lie when tokens come in `order`: the prompts that completions share, these completions, and
    all other runs. `place` is the reverse: where each token of the trees is then.

    Compiled layers know them only by `handle`, so that no layout makes them compile again; whoever
    runs a forward and backward pass must keep the object. `own` bounds every prompt and every
    completion, `shared` the completions and the prompt of each tree that has both, which are the tokens in
    `completions` and `prompts`.

    With a `shape`, one of `shapes`, each section ends with padding, which repeats the first token. Bounds of one shape
    differ in the numbers of their tensors alone.
    """

    def __init__(self, trees: tuple[Tree, ...], device: torch.device, shapes: Shapes | None = None) -> None:
        shared = [tree for tree in trees if tree.is_shared]
        prompts = [(tree.start, tree.prompt_length) for tree in shared]
        completions = [run for tree in shared for run in _runs(tree)[1:]]
        others = [run for tree in trees if not tree.is_shared for run in _runs(tree)]
        sections = [[n for _, n in runs] for runs in (prompts, completions, others)]
        siblings = [sum(tree.completion_lengths) for tree in shared]
        lengths = Lengths(sections[0], sections[1], siblings, sections[2])
        fitted = None if shapes is None else shapes.fit(lengths)
        self.shape = None if fitted is None else fitted[0]
        padding = NO_PADDING if fitted is None else fitted[1]
        padded = [runs + more for runs, more in zip(sections, padding.sections, strict=True)]
        no_trees = [0] * padding.empty_trees
        keys, queries = padded[0] + no_trees, siblings + padding.siblings + no_trees
        own = [*padded[0], *padded[1], *padded[2], *[0] * padding.empty_runs]
        order, place = _order((prompts, completions, others), padding.sections)
        indices = (order, place, *map(_bounds, (own, queries, keys)))
        self.order, self.place, *self.numbers = to_device(map(torch.from_numpy, indices), device)
        self.longest = [max(lengths, default=1) for lengths in (own, queries, keys)]
        if self.shape is not None:
            self.longest = [self.shape.longest_run, self.shape.longest_tree, self.shape.longest_prompt]
        self.prompts = slice(0, sum(keys))
        self.completions = slice(self.prompts.stop, self.prompts.stop + sum(queries))
        self._register()

    def copy(self) -> Bounds:
        """The same, with numbers of its own."""
        other = copy.copy(self)
        other.numbers = [numbers.clone() for numbers in self.numbers]
        other._register()
        return other

    def _register(self) -> None:
        number = next(_handles)
        self.handle = torch.tensor(number)
        _alive[number] = self

    @property
    def own(self) -> Half:
        bounds, longest = self.numbers[0], self.longest[0]
        return bounds, bounds, longest, longest, True

    @property
    def shared(self) -> Half:
        return self.numbers[1], self.numbers[2], self.longest[1], self.longest[2], False

    @property
    def has_shared(self) -> bool:
        """Whether there is a second half."""
        return self.prompts.stop > 0


def flash_fits(query: Tensor, value: Tensor) -> bool:
    """Whether the GPU kernels take these heads."""
    size = query.shape[-1]
    return query.is_cuda and query.dtype in HALF and size % 8 == 0 and size <= 256 and value.shape[-1] == size


def flash_trees(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> Tensor:
    """[T, H, D] attention over tree paths of tokens in the order of the bounds; q [T, H, D], k and v [T, K, D]."""
    return torch.ops.palestra.tree_attention(q, k, v, bounds.handle, scale)[0]


@torch.library.custom_op("palestra::tree_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """([T, H, D] output, [H, T] log-sum-exp) over both halves."""
    bounds = _alive[int(handle)]
    out, lse = _half(q, k, v, bounds.own, scale)
    if bounds.has_shared:
        completions, prompts = bounds.completions, bounds.prompts
        half, half_lse = _half(q[completions], k[prompts], v[prompts], bounds.shared, scale)
        _merge(q.device.type)(out[completions], lse[:, completions], half, half_lse)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("palestra::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = _alive[int(handle)]
    dq, dk, dv = _half_backward(grad, q, k, v, out, lse, bounds.own, scale)
    if bounds.has_shared:
        c, p = bounds.completions, bounds.prompts
        more = _half_backward(grad[c], q[c], k[p], v[p], out[c], lse[:, c].contiguous(), bounds.shared, scale)
        torch._foreach_add_([dq[c], dk[p], dv[p]], more)
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, handle, out, lse = ctx.saved_tensors
    grads = torch.ops.palestra.tree_attention_backward(grad.contiguous(), q, k, v, out, lse, handle, ctx.scale)
    return *grads, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _half(q: Tensor, k: Tensor, v: Tensor, half: Half, scale: float) -> tuple[Tensor, Tensor]:
    """([n, H, D] output, [H, n] log-sum-exp) of segments of queries over segments of keys."""
    *bounds, causal = half
    found = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False, scale=scale)
    return found[0].contiguous(), found[1]


def _half_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, half: Half, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    *bounds, causal = half
    random = _no_dropout(q.device)
    with in_one_order(q):
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *bounds, 0.0, causal, random, random, scale=scale
        )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """The state of a random generator that is not asked."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


@cache
def _merge(device: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Adds the second half to the first: by Triton on a GPU."""
    if device != "cuda":
        return merge
    from palestra.learner import kernels

    return kernels.merge


def merge(out: Tensor, lse: Tensor, half: Tensor, half_lse: Tensor) -> None:
    """The output [n, H, D] and the log-sum-exp [H, n] of a softmax over the keys of both, in the place of the first."""
    both = torch.logaddexp(lse, half_lse)
    own_share, half_share = ((x - both).exp().T[:, :, None] for x in (lse, half_lse))
    out.copy_(out * own_share + half * half_share)
    lse.copy_(both)


def _bounds(lengths: list[int]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _runs(tree: Tree) -> list[tuple[int, int]]:
    """(start, length) of the prompt, if there is one, and of each completion."""
    lengths = [n for n in (tree.prompt_length, *tree.completion_lengths) if n]
    return list(zip(accumulate(lengths, initial=tree.start), lengths, strict=False))


def _order(sections: Sequence[Sequence[tuple[int, int]]], padding: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """(which token comes at each place, the reverse); padding repeats the first token."""
    parts = [part for runs, more in zip(sections, padding, strict=True) for part in (_places(runs), [-1] * sum(more))]
    order = np.concatenate(parts).astype(np.int64)
    real = (order >= 0).nonzero()[0]
    place = np.empty_like(real)
    place[order[real]] = real
    return np.maximum(order, 0), place


def _places(runs: Sequence[tuple[int, int]]) -> Array:
    starts, lengths = np.array(runs, np.int64).reshape(-1, 2).T
    return ragged_arange(starts, lengths)
