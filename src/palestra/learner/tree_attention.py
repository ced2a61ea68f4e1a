"""Attention over packed trees: a completion sees the root, its prompt and its own past, nothing else.

One function, registered with transformers' AttentionInterface, drives any model that follows that
interface; the layout of the packed tokens reaches it as the keyword `layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from palestra.algo.batching import Tree
from palestra.core.errors import UnsupportedModel
from palestra.engine.attention import attention_chunk, query_scales, scales_queries
from palestra.engine.recurrent import RecurrentLayer
from palestra.learner.patches import WALKS, ModulePatches, Registry
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention_cuda import HALF, Bounds, flash_trees
from palestra.learner.tree_runs import Run, Runs, of_about_one_length, runs_of

NAME = "palestra_trees"
MAX_REPEATS = 4


class Reach(NamedTuple):
    """How far back a layer attends; None: to the beginning."""

    window: int | None = None  # this many tokens
    chunk: int | None = None  # to the beginning of the chunk of this length


class Layout:
    """Where the trees lie behind the `root` tokens, with the index tensors and masks that every layer uses again.

    Layers compute tokens in an order of their own, the one of `bounds`, if `is_reordered`, padded to one of `shapes`.
    """

    def __init__(
        self, trees: tuple[Tree, ...], device: torch.device, shapes: Shapes | None = None, root: int = 0
    ) -> None:
        self.trees = trees
        self.root = root
        self.device = device
        self._shapes = shapes
        rows = (t.prompt_length + max(t.completion_lengths, default=0) for t in trees)
        self.longest_row = root + max(rows, default=0)
        if device.type == "cuda":  # copied to the device now, so that no pass waits for it
            self.bounds = Bounds(trees, device, shapes, root)
        self._masks: dict[tuple[int, int, Reach], Tensor] = {}
        self._spread: dict[int, Runs] = {}
        self.recurrent: Sequence[RecurrentLayer] = ()
        self.runs: Any = None  # of recurrent layers, made by the first of them
        self.flash_windows = True  # whether flash attention computes windows and sinks, too
        self.positions = torch.empty(0)  # [T] of the tokens in the order in which layers compute them
        self.handle = LAYOUTS.add(self)

    def copy(self) -> Layout:
        """The same, with bounds of its own."""
        other = copy.copy(self)
        other.bounds = self.bounds.copy()
        other.handle = LAYOUTS.add(other)
        return other

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.trees, self.device, self._shapes, self.root)

    @property
    def is_reordered(self) -> bool:
        return self.device.type == "cuda" and (self.bounds.has_shared or self.bounds.shape is not None)

    def reorder(self, tokens: Tensor) -> Tensor:
        """[T, …] of the trees' tokens as layers compute them."""
        return tokens.index_select(0, self.bounds.order) if self.is_reordered else tokens

    def restore(self, tokens: Tensor) -> Tensor:
        """The reverse."""
        return tokens.index_select(0, self.bounds.place) if self.is_reordered else tokens

    def computed_at(self, places: Tensor) -> Tensor:
        """Where layers compute the tokens at these places of the trees."""
        return self.bounds.place[places] if self.is_reordered else places

    def mask(self, queries: int, keys: int, reach: Reach) -> Tensor:
        """[queries, keys] bool: causal with the last query at the last key, within the window and the chunk."""
        key = (queries, keys, reach)
        if key not in self._masks:
            place = torch.arange(keys - queries, keys, device=self.device)[:, None]
            seen = torch.arange(keys, device=self.device)[None, :]
            visible = seen <= place
            if reach.window is not None:
                visible &= seen > place - reach.window
            if reach.chunk is not None:
                visible &= seen >= place - place % reach.chunk
            self._masks[key] = visible
        return self._masks[key]

    def spread(self, tree: Tree) -> Runs:
        """The completions of a tree, padded."""
        if tree.start not in self._spread:
            runs = runs_of(tree)
            self._spread[tree.start] = Runs.of(runs[1:] if tree.prompt_length else runs, self.device)
        return self._spread[tree.start]


LAYOUTS: Registry[Layout] = Registry()


def tree_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, K, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of every packed token to its own tree path. Attention dropout is not applied."""
    if layout is None:
        raise UnsupportedModel(f"{type(module).__name__} does not hand keywords on to its attention function")
    if scales_queries(module, query.shape[2]):  # by the place among the packed tokens instead of the position
        packed = torch.arange(query.shape[2], device=query.device)
        factors = query_scales(module, layout.positions) / query_scales(module, packed)
        query = (query * factors).to(query.dtype)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, H, D]
    chunk, longest = attention_chunk(module), layout.longest_row
    window = sliding_window if sliding_window is not None and sliding_window < longest else 0
    in_chunks = chunk is not None and chunk < longest
    is_plain = softcap is None and s_aux is None and not window and not in_chunks
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    with_windows = layout.flash_windows and softcap is None and not in_chunks
    if flash_fits(q, v) and (is_plain or (with_windows and (not window or layout.bounds.shape is None))):
        # Repeated here, where a compiled layer fuses it and its gradient's sum; the kernel's own sum is slow.
        k, v = (repeated(x, q.shape[1]) for x in (k, v))
        out = flash_trees(q, k, v, layout.bounds, scale, s_aux, window)
    elif torch.compiler.is_compiling():
        sinks = [] if s_aux is None else [s_aux]
        constants = [float(value or 0) for value in (scaling, softcap, sliding_window, chunk)]
        out = torch.ops.palestra.walk_trees("attention", [q, k, v, *sinks], [], [layout.handle], constants)
    elif is_plain and q.device.type == "cpu" and v.shape[-1] == q.shape[-1]:  # as the fused kernel needs it
        out = cpu_trees(q, k, v, layout.trees, scale, layout.root)
    else:
        extra = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
        out = masked_trees(q, k, v, layout, Reach(sliding_window, chunk), extra)
    return out[None], None  # [1, T, H, D]


def flash_fits(query: Tensor, value: Tensor) -> bool:
    """Whether the GPU kernels take these heads."""
    size = query.shape[-1]
    return query.is_cuda and query.dtype in HALF and size % 8 == 0 and size <= 256 and value.shape[-1] <= size


def repeated(x: Tensor, heads: int) -> Tensor:
    """[T, K, D] -> [T, heads, D], if each key-value head serves few heads of queries; else as it is."""
    share = heads // x.shape[1]
    return x[:, :, None].expand(-1, -1, share, -1).flatten(1, 2) if 1 < share <= MAX_REPEATS else x


def masked_trees(q: Tensor, k: Tensor, v: Tensor, layout: Layout, reach: Reach, extra: dict[str, Any]) -> Tensor:
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
    tree: Tree, q: Tensor, k: Tensor, v: Tensor, layout: Layout, reach: Reach, extra: dict[str, Any]
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


def use_tree_attention(model: Any, patches: ModulePatches) -> None:
    """Let the model attend over trees; backward passes must happen before the patch is undone."""
    AttentionInterface.register(NAME, tree_attention)
    patches.set(model.config, "_attn_implementation", NAME)


MAX_PADDING = 1.1  # times the length of the shortest run of a batch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@torch.compiler.disable  # it walks the trees, which differ from one micro-batch to the next
def cpu_trees(q: Tensor, k: Tensor, v: Tensor, trees: tuple[Tree, ...], scale: float, root: int = 0) -> Tensor:
    """[T, H, D] attention of packed tokens over their tree paths; q [T, H, D], k and v [T, K, D]."""
    if (repeats := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    out: Tensor = _TreeAttention.apply(q, k, v, trees, scale, root)
    return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trees: tuple[Tree, ...], scale: float, root: int) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        total = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))  # log-sum-exp
        for runs in _batches(trees, root):
            own_out, own_total = _flash(_pad(runs, q), _pad(runs, k), _pad(runs, v), 0.0, True, scale=scale)
            _unpad(runs, own_out, out)
            _unpad(runs, own_total, total)
        for prompt, own in _shared(trees, root):
            queries, keys, values = _batch(q[own]), _batch(k[prompt]), _batch(v[prompt])
            half, half_total = _flash(queries, keys, values, 0.0, False, scale=scale)
            half, half_total = half[0].transpose(0, 1), half_total[0].transpose(0, 1)
            out[own].lerp_(half, (half_total - total[own]).sigmoid_()[..., None].to(out.dtype))
            total[own] = torch.logaddexp(total[own], half_total)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.trees, ctx.scale, ctx.root = trees, scale, root
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for runs in _batches(ctx.trees, ctx.root):
            inputs = _pad(runs, grad, zeros=True), *(_pad(runs, x) for x in (q, k, v, out, total))
            for whole, part in zip((dq, dk, dv), _flash_backward(*inputs, 0.0, True, scale=ctx.scale), strict=True):
                _unpad(runs, part, whole)
        for prompt, own in _shared(ctx.trees, ctx.root):
            keys, values = _batch(k[prompt]), _batch(v[prompt])
            inputs = _batch(grad[own]), _batch(q[own]), keys, values, _batch(out[own]), _batch(total[own])
            by_q, by_k, by_v = _flash_backward(*inputs, 0.0, False, scale=ctx.scale)
            dq[own] += by_q[0].transpose(0, 1)
            dk[prompt] += by_k[0].transpose(0, 1)
            dv[prompt] += by_v[0].transpose(0, 1)
        return dq, dk, dv, None, None, None


def _pad(runs: Runs, x: Tensor, zeros: bool = False) -> Tensor:
    """[T, H, ...] -> [rows, H, n, ...]; `zeros`: in place of the padding."""
    return runs.rows(x, zeros=zeros).transpose(1, 2)


def _unpad(runs: Runs, x: Tensor, whole: Tensor) -> None:
    """The reverse, into `whole`."""
    whole.index_copy_(0, runs.tokens, runs.flat(x.transpose(1, 2)))


@lru_cache(maxsize=2)  # every layer asks for the same, forward and backward
def _batches(trees: tuple[Tree, ...], root: int) -> list[Runs]:
    """Root, prompts and completions, each with its own causal attention; those of about one length together."""
    runs = [*([Run(0, root)] if root else []), *(run for tree in trees for run in runs_of(tree))]
    return [Runs.of(batch, torch.device("cpu")) for batch in of_about_one_length(runs, MAX_PADDING)]


def _batch(x: Tensor) -> Tensor:
    """[n, H, ...] -> [1, H, n, ...]."""
    return x[None].transpose(1, 2)


def _shared(trees: tuple[Tree, ...], root: int) -> Iterator[tuple[slice, slice]]:
    """(prompt, its completions) of each tree that has both, and (root, all trees)."""
    for tree in trees:
        middle, end = tree.start + tree.prompt_length, tree.start + tree.length
        if tree.start < middle < end:
            yield slice(tree.start, middle), slice(middle, end)
    if root:
        yield slice(0, root), slice(root, None)
