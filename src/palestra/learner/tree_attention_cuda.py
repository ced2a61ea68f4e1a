"""Tree attention by up to three flash-attention calls: each token to its own run, completions to their prompt, and all
tokens to the root, the common beginning of all trees.

These parts are partial softmaxes over disjoint keys; they are merged by their log-sum-exps. The
backward pass gives each part the merged output and log-sum-exp, which makes its gradients exact, so
neither a mask nor a second copy of a prompt's keys ever exists. Attention sinks are one more part: keys whose values
are zeros. Within a sliding window one call is enough, in which the keys just before each run are copied.

Tokens come with the root and the prompts first, so that all parts read slices: to pick them out of every tensor in
every layer takes more launches than all else, and small models wait for launches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.algo.batching import Run, Tree, ragged_arange
from palestra.core.machine import in_one_order, to_device
from palestra.core.types import Array
from palestra.learner.compiled_layers import Registry
from palestra.learner.shapes import NO_PADDING, Lengths, Shapes

HALF = (torch.bfloat16, torch.float16)
Half = tuple[Tensor, Tensor, int, int, bool, int]  # query bounds, key bounds, the longest of each, causal, window or 0

# The backward kernel works in parallel on segments, heads and blocks of keys. A root has few blocks of keys, so the
# tokens that attend to it are divided into up to this many segments, each with a copy of its keys.
ROOT_SEGMENTS, SHORTEST_SEGMENT = 16, 128


class Bounds:
    """Where the parts of attention lie when tokens come in `order`: the root, the prompts that completions share, these
    completions, and all other runs. `place` is the reverse: where each token of the trees is then.

    Compiled layers know them only by `handle`, so that no layout makes them compile again; whoever
    runs a forward and backward pass must keep the object. `own` bounds the root, every prompt and every
    completion, `shared` the completions and the prompt of each tree that has both, which are the tokens in
    `completions` and `prompts`. `to_root` bounds segments of all tokens behind the root (`rest`), and copies of the
    root's keys, one for each segment.

    With a `shape`, one of `shapes`, each section ends with padding, which repeats the first token. Bounds of one shape
    differ in the numbers of their tensors alone.
    """

    def __init__(
        self, trees: tuple[Tree, ...], device: torch.device, shapes: Shapes | None = None, root: int = 0
    ) -> None:
        shared = [tree for tree in trees if tree.is_shared]
        prompts = [Run(tree.start, tree.prompt_length) for tree in shared]
        completions = [run for tree in shared for run in tree.runs[1:]]
        others = [run for tree in trees if not tree.is_shared for run in tree.runs]
        runs_of_sections = [Run(0, root)] if root else [], prompts, completions, others
        sections = [[run.length for run in runs] for runs in runs_of_sections]
        siblings = [sum(tree.completion_lengths) for tree in shared]
        fitted = None if shapes is None else shapes.fit(Lengths(sections, siblings))
        self.shape = None if fitted is None else fitted[0]
        padding = NO_PADDING if fitted is None else fitted[1]
        padded = [runs + more for runs, more in zip(sections, padding.sections, strict=True)]
        no_trees = [0] * padding.empty_trees
        keys, queries = padded[1] + no_trees, siblings + padding.siblings + no_trees
        own = [n for runs in padded for n in runs] + [0] * padding.empty_runs
        order, place = _order(runs_of_sections, padding.sections)
        self.root = slice(0, sum(padded[0]))
        self.prompts = slice(self.root.stop, self.root.stop + sum(keys))
        self.completions = slice(self.prompts.stop, self.prompts.stop + sum(queries))
        self.rest = slice(self.root.stop, len(order))
        self.segments = max(1, min(ROOT_SEGMENTS, (self.rest.stop - self.rest.start) // SHORTEST_SEGMENT))
        bounds = [own, queries, keys, *self._to_root(padded[0])]
        indices = (order, place, *map(_bounds, bounds))
        self.order, self.place, *self.numbers = to_device(map(torch.from_numpy, indices), device)
        self._own, self._paths = own, partial(_before, trees, root, place)
        self._windows: dict[int, Window] = {}
        self.longest = [max(lengths, default=1) for lengths in bounds]
        if self.shape is not None:
            of_shape = [self.shape.longest_run, self.shape.longest_tree, self.shape.longest_prompt]
            self.longest = [*of_shape, *self.longest[3:4], *([self.shape.root] if self.shape.root else [])]
        self.handle = _BOUNDS.add(self)

    def _to_root(self, root: list[int]) -> list[list[int]]:
        """The lengths of segments of the rest, and of the root's copies, if there is a root.

        The padding behind the root in each copy belongs to a segment without queries: nothing attends to it.
        """
        if not root:
            return []
        rest = self.rest.stop - self.rest.start
        parts = np.diff(np.arange(self.segments + 1) * rest // self.segments).tolist()
        queries = [n for part in parts for n in (part, *[0] * (len(root) - 1))]
        return [queries, root * self.segments]

    def copy(self) -> Bounds:
        """The same, with numbers of its own."""
        other = copy.copy(self)
        other.numbers = [numbers.clone() for numbers in self.numbers]
        other.handle = _BOUNDS.add(other)
        return other

    @property
    def own(self) -> Half:
        bounds, longest = self.numbers[0], self.longest[0]
        return bounds, bounds, longest, longest, True, 0

    @property
    def shared(self) -> Half:
        return self.numbers[1], self.numbers[2], self.longest[1], self.longest[2], False, 0

    @property
    def has_shared(self) -> bool:
        """Whether completions share a prompt."""
        return self.prompts.stop > self.prompts.start

    @property
    def to_root(self) -> Half:
        return self.numbers[3], self.numbers[4], self.longest[3], self.longest[4], False, 0

    def copies_of_root(self, x: Tensor) -> Tensor:
        """[T, …] -> [segments · root, …]."""
        return x[self.root].expand(self.segments, *[-1] * x.dim()).flatten(0, 1)

    def sum_of_copies(self, x: Tensor) -> Tensor:
        """[segments · root, …] -> [root, …]: the gradient of `copies_of_root`."""
        return x.unflatten(0, (self.segments, -1)).sum(0)

    def within(self, window: int) -> Window:
        """How tokens attend to this many, themselves included, of their paths."""
        assert self.shape is None, "passes over windows are not captured, so they are not padded"
        if window not in self._windows:
            nothing, most = np.zeros(0, np.int64), window - 1  # the last places before each run
            paths = [np.concatenate([nothing, *(np.arange(*ends) for ends in path)]) for path in self._paths()]
            tails = [path[-most:] if most else nothing for path in paths]
            runs = [np.arange(*ends) for ends in pairwise(_bounds(self._own).tolist())]
            keys = [np.concatenate(both) for both in zip(tails, runs, strict=True)]
            lengths = [len(part) for part in keys]
            is_tail = np.concatenate([np.arange(n) < len(tail) for n, tail in zip(lengths, tails, strict=True)])
            of_keys = np.concatenate(keys)
            arrays = _bounds(lengths), of_keys, np.flatnonzero(~is_tail), np.flatnonzero(is_tail), of_keys[is_tail]
            k_bounds, *indices = to_device(map(torch.from_numpy, arrays), self.order.device)
            half = self.numbers[0], k_bounds, self.longest[0], max(lengths, default=1), True, window
            self._windows[window] = Window(half, *indices)
        return self._windows[window]


class Window(NamedTuple):
    """Every run of tokens attends to itself and to copies of the keys just before it."""

    half: Half
    keys: Tensor  # [n] which tokens' keys these are
    own: Tensor  # [T] where in `keys` each token's own is
    copies: Tensor  # [n - T] where the copies are,
    copied: Tensor  # and of which tokens

    def sum_of_copies(self, x: Tensor) -> Tensor:
        """[n, …] -> [T, …]: the gradient of copying."""
        own = x.index_select(0, self.own)
        with in_one_order(x):
            return own.index_add_(0, self.copied, x.index_select(0, self.copies))


_BOUNDS: Registry[Bounds] = Registry()


def flash_trees(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, sinks: Tensor | None = None, window: int = 0
) -> Tensor:
    """[T, H, D] attention over tree paths of tokens in the order of the bounds; q [T, H, D], k and v [T, K, D], where
    v may be narrower, and so is what is returned.

    `sinks` are [H] logits that each softmax has in addition to those of its keys. With a `window`, tokens attend to
    that many tokens, themselves included.
    """
    width = v.shape[-1]
    if width < q.shape[-1]:  # the kernels know one width
        v = F.pad(v, (0, q.shape[-1] - width))
    given = [] if sinks is None else [sinks]
    out: Tensor = torch.ops.palestra.tree_attention(q, k, v, given, bounds.handle, scale, window)[0]
    return out[..., :width]


@torch.library.custom_op("palestra::tree_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: list[Tensor], handle: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """([T, H, D] output, [H, T] log-sum-exp) over all parts."""
    bounds = _BOUNDS[handle]
    if window:
        near = bounds.within(window)
        out, lse = _half(q, k[near.keys], v[near.keys], near.half, scale)
    else:
        out, lse = _half(q, k, v, bounds.own, scale)
        if bounds.has_shared:
            completions, prompts = bounds.completions, bounds.prompts
            half, half_lse = _half(q[completions], k[prompts], v[prompts], bounds.shared, scale)
            merge(out[completions], lse[:, completions], half, half_lse)
        if bounds.root.stop:
            rest, copies = bounds.rest, bounds.copies_of_root
            half, half_lse = _half(q[rest], copies(k), copies(v), bounds.to_root, scale)
            merge(out[rest], lse[:, rest], half, half_lse)
    for sink in sinks:
        both = torch.logaddexp(lse, sink.float()[:, None])
        out.mul_((lse - both).exp_().T[:, :, None])
        lse = both
    return out, lse


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("palestra::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: list[Tensor], handle: Tensor,
    scale: float, window: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients by q, k, v and sinks."""
    bounds = _BOUNDS[handle]
    if window:
        near = bounds.within(window)
        dq, *of_copies = _half_backward(grad, q, k[near.keys], v[near.keys], out, lse, near.half, scale)
        dk, dv = map(near.sum_of_copies, of_copies)
    else:
        dq, dk, dv = _half_backward(grad, q, k, v, out, lse, bounds.own, scale)
        if bounds.has_shared:
            c, p = bounds.completions, bounds.prompts
            more = _half_backward(grad[c], q[c], k[p], v[p], out[c], lse[:, c].contiguous(), bounds.shared, scale)
            torch._foreach_add_([dq[c], dk[p], dv[p]], more)
        if bounds.root.stop:
            r, root, copies = bounds.rest, bounds.root, bounds.copies_of_root
            parts = grad[r], q[r], copies(k), copies(v), out[r], lse[:, r].contiguous()
            dq_more, *of_copies = _half_backward(*parts, bounds.to_root, scale)
            torch._foreach_add_([dq[r], dk[root], dv[root]], [dq_more, *map(bounds.sum_of_copies, of_copies)])
    found = [dq, dk, dv]
    for sink in sinks:
        share = (sink.float()[:, None] - lse).exp_()  # [H, T] of each softmax
        found.append(-(share * (grad.float() * out.float()).sum(-1).T).sum(1).to(sink.dtype))
    return found


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: list[Tensor], *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, *sinks)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, handle, *ctx.rule = inputs
    ctx.save_for_backward(handle, q, k, v, *output, *sinks)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    handle, q, k, v, out, lse, *sinks = ctx.saved_tensors
    tensors = grad.contiguous(), q, k, v, out, lse
    dq, dk, dv, *of_sinks = torch.ops.palestra.tree_attention_backward(*tensors, sinks, handle, *ctx.rule)
    return dq, dk, dv, of_sinks, None, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _half(q: Tensor, k: Tensor, v: Tensor, half: Half, scale: float) -> tuple[Tensor, Tensor]:
    """([n, H, D] output, [H, n] log-sum-exp) of segments of queries over segments of keys."""
    *bounds, causal, window = half
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, 0.0, causal, False, scale=scale, **_options_of(window)
    )
    return found[0].contiguous(), found[1]


def _half_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, half: Half, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    *bounds, causal, window = half
    random = _no_dropout(q.device)
    with in_one_order(q):
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *bounds, 0.0, causal, random, random, scale=scale, **_options_of(window)
        )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _options_of(window: int) -> dict[str, int]:
    """The kernel counts the keys before a query's own, which is the last one for the last query of a segment."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


@cache
def _no_dropout(device: torch.device) -> Tensor:
    """The state of a random generator that is not asked."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


def merge(out: Tensor, lse: Tensor, half: Tensor, half_lse: Tensor) -> None:
    """The output [n, H, D] and the log-sum-exp [H, n] of a softmax over the keys of both, in the place of the first."""
    if out.is_cuda:
        from palestra.learner import kernels

        kernels.merge(out, lse, half, half_lse)
        return
    both = torch.logaddexp(lse, half_lse)
    own_share, half_share = ((x - both).exp().T[:, :, None] for x in (lse, half_lse))
    out.copy_(out * own_share + half * half_share)
    lse.copy_(both)


def _bounds(lengths: list[int]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int32)


def _before(trees: Sequence[Tree], root: int, place: Array) -> list[list[tuple[int, int]]]:
    """The places (first, end) of what comes before each run: the root, then its prompt."""

    def of(start: int, length: int) -> list[tuple[int, int]]:
        return [(int(place[start]), int(place[start]) + length)] if length else []

    first: list[list[tuple[int, int]]] = [[]] if root else []
    at_root = of(0, root)
    shared = [tree for tree in trees if tree.is_shared]
    prompts = [at_root] * len(shared)
    completions = [
        at_root + of(tree.start, tree.prompt_length) for tree in shared for length in tree.completion_lengths if length
    ]
    others = [at_root for tree in trees if not tree.is_shared for _ in tree.runs]
    return [*first, *prompts, *completions, *others]


def _order(sections: Sequence[Sequence[Run]], padding: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """(which token comes at each place, the reverse); padding repeats the first token."""
    parts: list[Any] = []
    for runs, more in zip(sections, padding, strict=True):
        starts, lengths, _ = np.array(runs, np.int64).reshape(-1, 3).T
        parts += [ragged_arange(starts, lengths), [-1] * sum(more)]
    order = np.concatenate(parts).astype(np.int64)
    real = (order >= 0).nonzero()[0]
    place = np.empty_like(real)
    place[order[real]] = real
    return np.maximum(order, 0), place
