"""Tree attention on a CPU: every run causal by itself, completions over their prompt, merged.

The same mathematics as on a GPU (`flash_trees`): the backward pass gives each part the merged output and
log-sum-exp, which makes its gradients exact. So there is no mask, and no copy of a prompt's keys for each sibling.
Runs of about one length are computed in one call, padded at their ends, where nobody sees the padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Tree
from palestra.core.types import Array

MAX_PADDING = 1.1  # times the length of the shortest run of a batch

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether the CPU's fused kernel takes these heads."""
    return query.device.type == "cpu" and value.shape[-1] == query.shape[-1]


@torch.compiler.disable  # it walks the trees, which differ from one micro-batch to the next
def cpu_trees(q: Tensor, k: Tensor, v: Tensor, trees: tuple[Tree, ...], scale: float) -> Tensor:
    """[T, H, D] attention of packed tokens over their tree paths; q [T, H, D], k and v [T, K, D]."""
    if repeats := q.shape[1] // k.shape[1] - 1:
        k, v = (x.repeat_interleave(repeats + 1, dim=1) for x in (k, v))
    out: Tensor = _TreeAttention.apply(q, k, v, trees, scale)
    return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trees: tuple[Tree, ...], scale: float) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        total = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))  # log-sum-exp
        for runs in _batches(trees):
            part = _attend(*(runs.pad(x) for x in (q, k, v)), 0.0, True, scale=scale)
            for whole, result in zip((out, total), part, strict=True):
                runs.unpad(result, whole)
        for prompt, own in _shared(trees):
            queries, keys, values = _batch(q[own]), _batch(k[prompt]), _batch(v[prompt])
            half, half_total = (x[0].transpose(0, 1) for x in _attend(queries, keys, values, 0.0, False, scale=scale))
            out[own].lerp_(half, (half_total - total[own]).sigmoid_()[..., None].to(out.dtype))
            total[own] = torch.logaddexp(total[own], half_total)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.trees, ctx.scale = trees, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for runs in _batches(ctx.trees):
            parts = runs.pad(grad, zeros=True), *(runs.pad(x) for x in (q, k, v, out, total))
            for whole, result in zip((dq, dk, dv), _attend_backward(*parts, 0.0, True, scale=ctx.scale), strict=True):
                runs.unpad(result, whole)
        for prompt, own in _shared(ctx.trees):
            queries, results = (_batch(x[own]) for x in (grad, q)), (_batch(x[own]) for x in (out, total))
            keys, values = _batch(k[prompt]), _batch(v[prompt])
            parts = _attend_backward(*queries, keys, values, *results, 0.0, False, scale=ctx.scale)
            for whole, place, result in zip((dq, dk, dv), (own, prompt, prompt), parts, strict=True):
                whole[place] += result[0].transpose(0, 1)
        return dq, dk, dv, None, None


@dataclass(frozen=True, slots=True)
class _Runs:
    """Prompts and completions of about one length, each causal by itself."""

    rows: int
    places: Tensor  # [rows * n] the token at each place; padding repeats a run's last
    padding: Tensor | None  # which places hold none
    real: Tensor | None  # which do
    tokens: Tensor  # [tokens] what they hold

    def pad(self, x: Tensor, zeros: bool = False) -> Tensor:
        """[T, H, ...] -> [rows, H, n, ...]; `zeros`: in place of the padding."""
        padded = x.index_select(0, self.places)
        if zeros and self.padding is not None:
            padded.index_fill_(0, self.padding, 0.0)
        return _batch(padded, self.rows)

    def unpad(self, x: Tensor, whole: Tensor) -> None:
        """The reverse, into `whole`."""
        flat = x.transpose(1, 2).flatten(0, 1)
        whole.index_copy_(0, self.tokens, flat if self.real is None else flat.index_select(0, self.real))


@lru_cache(maxsize=2)  # every layer asks for the same, forward and backward
def _batches(trees: tuple[Tree, ...]) -> list[_Runs]:
    """All runs, those of about one length together."""
    lengths = np.array([n for tree in trees for n in (tree.prompt_length, *tree.completion_lengths) if n])
    starts = lengths.cumsum() - lengths
    order = lengths.argsort(kind="stable")
    found, first = [], 0
    for i in range(1, len(order) + 1):
        if i < len(order) and lengths[order[i]] <= MAX_PADDING * lengths[order[first]]:
            continue
        found.append(_padded(starts[order[first:i]], lengths[order[first:i]]))
        first = i
    return found


def _padded(starts: Array, lengths: Array) -> _Runs:
    step = np.arange(lengths.max())
    is_real = (step < lengths[:, None]).reshape(-1)
    places = torch.from_numpy((starts[:, None] + np.minimum(step, lengths[:, None] - 1)).reshape(-1))
    if is_real.all():
        return _Runs(len(starts), places, None, None, places)
    real, padding = (torch.from_numpy(np.flatnonzero(which)) for which in (is_real, ~is_real))
    return _Runs(len(starts), places, padding, real, places[real])


def _batch(x: Tensor, rows: int = 1) -> Tensor:
    """[rows * n, H, ...] -> [rows, H, n, ...]."""
    return x.unflatten(0, (rows, -1)).transpose(1, 2)


def _shared(trees: tuple[Tree, ...]) -> Iterator[tuple[slice, slice]]:
    """(prompt, its completions) of each tree that has both."""
    for tree in trees:
        middle, end = tree.start + tree.prompt_length, tree.start + tree.length
        if tree.start < middle < end:
            yield slice(tree.start, middle), slice(middle, end)
