"""Attention over packed trees with masks, tree by tree: for layers that flash attention does not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.algo.batching import Tree
from palestra.learner.compiled_layers import LAYOUTS, WALKS


class Reach(NamedTuple):
    """How far back a layer attends; None: to the beginning."""

    window: int | None = None  # this many tokens
    chunk: int | None = None  # to the beginning of the chunk of this length


def masked_trees(q: Tensor, k: Tensor, v: Tensor, layout: Any, reach: Reach, extra: dict[str, Any]) -> Tensor:
    """[T, H, D] attention, tree by tree, with masks no larger than one completion over its path."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention walks the trees of the micro-batch, which the next one does not have")
    q, k, v = (layout.restore(x) for x in (q, k, v))
    trees = (Tree(0, layout.root, ()), *layout.trees)
    outputs = [out for tree in trees for out in _attend_tree(tree, q, k, v, layout, reach, extra)]
    return layout.reorder(torch.cat(outputs))


def _masked(handles: list[Tensor], constants: list[float]) -> tuple[Callable[..., Tensor], tuple[()]]:
    """`masked_trees` as a function of queries, keys, values and sinks. A constant of 0 is none."""
    scale, softcap, window, chunk = (value or None for value in constants)
    reach = Reach(window and int(window), chunk and int(chunk))

    def compute(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        extra = {"scale": scale, "softcap": softcap, "sinks": sinks[0] if sinks else None}
        return masked_trees(q, k, v, LAYOUTS[handles[0]], reach, extra)

    return compute, ()


WALKS["attention"] = _masked


def _attend_tree(
    tree: Tree, q: Tensor, k: Tensor, v: Tensor, layout: Any, reach: Reach, extra: dict[str, Any]
) -> Iterator[Tensor]:
    """The tree's outputs [n, H, D]: those of the prompt, then those of all completions."""
    start, middle = tree.start, tree.start + tree.prompt_length
    prompt = slice(start, middle)
    k_past, v_past = k[prompt], v[prompt]
    if root := min(start, layout.root):
        k_past, v_past = torch.cat([k[:root], k_past]), torch.cat([v[:root], v_past])
    if tree.prompt_length:
        mask = layout.mask(tree.prompt_length, len(k_past), reach)
        yield _attend(q[prompt][None], k_past[None], v_past[None], mask, **extra)[0]
    siblings = len(tree.completion_lengths)
    if not siblings:
        return
    if siblings == 1:
        own = slice(middle, middle + tree.completion_lengths[0])
        q_own, k_own, v_own = (x[own][None] for x in (q, k, v))
    else:
        runs = layout.spread(tree)
        q_own, k_own, v_own = (runs.rows(x) for x in (q, k, v))
    if len(k_past):
        k_own = torch.cat([k_past.expand(siblings, -1, -1, -1), k_own], dim=1)
        v_own = torch.cat([v_past.expand(siblings, -1, -1, -1), v_own], dim=1)
    out = _attend(q_own, k_own, v_own, layout.mask(q_own.shape[1], k_own.shape[1], reach), **extra)
    yield out[0] if siblings == 1 else runs.flat(out)


def _attend(
    q: Tensor,  # [B, n, H, D]
    k: Tensor,  # [B, m, K, D]
    v: Tensor,
    mask: Tensor,  # [n, m] bool
    *,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, n, H, D] attention; the reference formula only where the fused kernel lacks a feature."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if softcap is None and sinks is None:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped).transpose(1, 2)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(2, 3)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2)
