"""Attention over packed trees: a completion sees the root, its prompt and its own past, nothing else.

One function, registered with transformers' AttentionInterface, drives any model that follows that
interface; the layout of the packed tokens reaches it as the keyword `layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, Run, Tree, pack
from palestra.core.errors import UnsupportedModel
from palestra.core.machine import to_device
from palestra.engine.attention import attention_chunk, query_scales, scales_queries
from palestra.engine.recurrent import RecurrentLayer
from palestra.learner.masked_attention import Reach, masked_trees
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention_cuda import HALF, Bounds, flash_trees

NAME = "palestra_trees"
MAX_REPEATS = 4


def of_about_one_length(runs: Iterable[Run], padding: float) -> Iterator[list[Run]]:
    """The runs in batches, up to `padding` times as long as the shortest; those that continue a state apart from those
    that do not."""
    batch: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.past < 0, run.length)):
        if batch and (run.length > padding * batch[0].length or (run.past < 0) != (batch[0].past < 0)):
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs that are computed in one call, padded to the longest of them."""

    count: int
    places: Tensor  # [count * longest] the token at each place; padding repeats a run's last
    real: Tensor | None  # which places hold a token of their own; None: all
    padding: Tensor | None  # which do not
    lengths: Tensor | None  # [count] the tokens of each; None: as many in all
    tokens: Tensor  # [tokens] those of all, one run after the other
    past: Tensor  # [count] whose states they continue; empty: they begin here

    @classmethod
    def of(cls, runs: Sequence[Run], device: torch.device, shortest: int = 1) -> Runs:
        starts, lengths, past = np.array(runs, np.int64).T
        step = np.arange(max(shortest, lengths.max()))
        places = (starts[:, None] + np.minimum(step, lengths[:, None] - 1)).reshape(-1)
        is_real = (step < lengths[:, None]).reshape(-1)
        columns = places, past[past >= 0], np.flatnonzero(is_real), np.flatnonzero(~is_real), lengths, places[is_real]
        at, continued, real, padding, n, tokens = to_device(map(torch.from_numpy, columns), device)
        if is_real.all():
            return cls(len(runs), at, None, None, None, at, continued)
        return cls(len(runs), at, real, padding, n, tokens, continued)

    def rows(self, x: Tensor, *, zeros: bool = False) -> Tensor:
        """[T, ...] -> [count, longest, ...]; `zeros`: in place of the padding."""
        padded = x.index_select(0, self.places)
        if zeros and self.padding is not None:
            padded.index_fill_(0, self.padding, 0.0)
        return padded.unflatten(0, (self.count, -1))

    def flat(self, x: Tensor) -> Tensor:
        """[count, longest, ...] -> [tokens, ...] one run after the other."""
        flat = x.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


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
        self.handle: Tensor | None = None  # of compiled layers, which know it by a number

    def copy(self) -> Layout:
        """The same, with bounds of its own."""
        other = copy.copy(self)
        other.bounds = self.bounds.copy()
        other.handle = None
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
            self._spread[tree.start] = Runs.of(tree.runs[1:] if tree.prompt_length else tree.runs, self.device)
        return self._spread[tree.start]


def pack_batch(
    batch: Batch, *, device: torch.device, shapes: Shapes | None = None, at_least: int = 1, **options: Any
) -> list[MicroBatch]:
    """Pack on the host, then copy to the device, so that no pass waits for it later.

    `options` are those of `algo.batching.pack`. Micro-batches that fit one of `shapes` are padded to it.
    """
    evenly = device.type == "cuda" or at_least > 1  # the largest one determines memory or time
    packed = pack(batch, evenly=evenly, at_least=at_least, **options)
    return [on_device(micro, device, shapes) for micro in packed]


def on_device(micro: MicroBatch, device: torch.device, shapes: Shapes | None = None) -> MicroBatch:
    return replace(micro.to(device), layout=Layout(micro.trees, device, shapes, micro.root))


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
    with_windows = layout.flash_windows and softcap is None and not in_chunks
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
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
    return query.is_cuda and query.dtype in HALF and size % 8 == 0 and value.shape[-1] <= size <= 256


def repeated(x: Tensor, heads: int) -> Tensor:
    """[T, K, D] -> [T, heads, D], if each key-value head serves few heads of queries; else as it is."""
    share = heads // x.shape[1]
    return x[:, :, None].expand(-1, -1, share, -1).flatten(1, 2) if 1 < share <= MAX_REPEATS else x


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
    runs = [*([Run(0, root)] if root else []), *(run for tree in trees for run in tree.runs)]
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
