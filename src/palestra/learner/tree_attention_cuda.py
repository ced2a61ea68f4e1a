"""Tree attention by two flash-attention calls: each token to its own run, and completions to their prompt.

Both halves are partial softmaxes over disjoint keys; they are merged by their log-sum-exps. The
backward pass gives each half the merged output and log-sum-exp, which makes its gradients exact, so
neither a mask nor a second copy of the prompt's keys ever exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Tree, to_device

HALF = (torch.bfloat16, torch.float16)


_alive: WeakValueDictionary[int, Bounds] = WeakValueDictionary()
_handles = count()


class Bounds:
    """Index tensors of the two halves.

    Compiled layers know them only by `handle`, so that no layout makes them compile again; whoever
    runs a forward and backward pass must keep the object. `own` bounds every prompt and every
    completion, `shared` the completions and the prompt of each tree that has both, whose tokens lie
    at `completions` and `prompts`; each goes (query bounds, key bounds, longest of each, causal).
    """

    def __init__(self, trees: tuple[Tree, ...], device: torch.device) -> None:
        shared = [tree for tree in trees if tree.prompt_length and tree.completion_lengths]
        runs = [n for tree in trees for n in (tree.prompt_length, *tree.completion_lengths) if n]
        prompts = [tree.prompt_length for tree in shared]
        completions = [sum(tree.completion_lengths) for tree in shared]
        self.longest_row = max(
            (tree.prompt_length + max(tree.completion_lengths, default=0) for tree in trees), default=0
        )
        indices = (
            _places((tree.start, n) for tree, n in zip(shared, prompts, strict=True)),
            _places((tree.start + tree.prompt_length, n) for tree, n in zip(shared, completions, strict=True)),
            *map(_bounds, (runs, completions, prompts)),
        )
        self.prompts, self.completions, bounds, queries, keys = to_device(indices, device)
        longest = max(runs, default=1)
        self.own = (bounds, bounds, longest, longest, True)
        self.shared = (queries, keys, max(completions, default=1), max(prompts, default=1), False)
        number = next(_handles)
        self.handle = torch.tensor(number)
        _alive[number] = self


def flash_fits(query: Tensor, value: Tensor) -> bool:
    """Whether the GPU kernels take these heads."""
    size = query.shape[-1]
    return query.is_cuda and query.dtype in HALF and size % 8 == 0 and size <= 256 and value.shape[-1] == size


def flash_trees(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float) -> Tensor:
    """[T, H, D] attention of packed tokens over their tree paths; q [T, H, D], k and v [T, K, D]."""
    return torch.ops.palestra.tree_attention(q, k, v, bounds.handle, scale)[0]


@torch.library.custom_op("palestra::tree_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """([T, H, D] output, [H, T] log-sum-exp) over both halves."""
    bounds = _alive[int(handle)]
    out, lse = _half(q, k, v, *bounds.own, scale)
    completions, prompts = bounds.completions, bounds.prompts
    if len(completions):
        half, half_lse = _half(q[completions], k[prompts], v[prompts], *bounds.shared, scale)
        own_lse = lse[:, completions]
        both_lse = torch.logaddexp(own_lse, half_lse)
        own_share, half_share = ((x - both_lse).exp().T[:, :, None] for x in (own_lse, half_lse))
        out[completions] = (out[completions] * own_share + half * half_share).to(out.dtype)
        lse[:, completions] = both_lse
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("palestra::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds = _alive[int(handle)]
    completions, prompts = bounds.completions, bounds.prompts
    dq, dk, dv = _half_backward(grad, q, k, v, out, lse, *bounds.own, scale)
    if len(completions):
        half_dq, half_dk, half_dv = _half_backward(
            grad[completions],
            q[completions],
            k[prompts],
            v[prompts],
            out[completions],
            lse[:, completions].contiguous(),
            *bounds.shared,
            scale,
        )
        dq[completions] += half_dq
        dk[prompts] += half_dk
        dv[prompts] += half_dv
    return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, handle, out, lse = ctx.saved_tensors
    grads = torch.ops.palestra.tree_attention_backward(grad.contiguous(), q, k, v, out, lse, handle, ctx.scale)
    return *grads, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)


def _half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """([n, H, D] output, [H, n] log-sum-exp) of segments of queries over segments of keys."""
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, q_bounds, k_bounds, max_q, max_k, 0.0, causal, False, scale=scale
    )
    return found[0].contiguous(), found[1]


def _half_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, q_bounds, k_bounds, max_q, max_k, 0.0, causal, random, random, scale=scale
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _bounds(lengths: list[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def _places(runs: Iterable[tuple[int, int]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(np.arange(a, a + n) for a, n in runs)]))
