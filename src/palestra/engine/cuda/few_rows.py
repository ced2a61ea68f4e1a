"""The layers at few rows, where a step costs what its kernels cost to start: five or six of them instead of eight.

Each product begins while the kernel before it still runs, which needs compute capability 9 (Hopper) or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from palestra.engine.cuda import layer_kernels
from palestra.engine.cuda.decoder_layers import Layer
from palestra.engine.cuda.paged_ops import overlap
from palestra.engine.supported import norm_epsilon

MAX_WIDTH = 1024  # of the hidden state; a wider model's weights take longer to read than kernels to start
MAX_SIZE = 72 * 1024  # rows times width; with more, the library's products are as fast
COLUMNS, DEPTH = 32, 64  # all widths and depths must be divisible by these
PROGRAMS = 144  # about an H200's processors: a long sum is split into parts for as many
MIN_SPAN = 256  # of a part
SHARED_MEMORY = 160 << 10  # bytes that a program may need


class Tile(NamedTuple):
    """What one program computes, and how."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tile_for(kind: str, rows: int, depth: int) -> Tile:
    """The quickest of what was tried on an H200, for the product `qkv`, `gated` or `added`."""
    if rows <= 16:
        return Tile(16, 32, 64, 2 if kind == "qkv" else 4, 6)
    if kind == "gated" or depth % 128:
        return Tile(64, 32, 64, 4, 6)
    return Tile(64, 32, 128, 4, 5)


def splits_for(tile: Tile, width: int, depth: int) -> int:
    """Into how many parts a sum of `depth` products is split, so that all processors have something to do."""
    fitting = [
        n for n in range(1, depth // tile.depth + 1)
        if depth % (n * tile.depth) == 0 and depth // n >= MIN_SPAN and width // tile.columns * n <= PROGRAMS
    ]  # fmt: skip
    return max(fitting, default=1)


class FewRows:
    """Runs a decoder's layers over a few tokens."""

    def __init__(self, embedding: Tensor, layers: Sequence[Layer]) -> None:
        self._embedding, self._layers = embedding, layers
        self.overlaps = embedding.is_cuda  # else it is Triton's interpreter
        self._arrived = torch.zeros(MAX_SIZE // COLUMNS, dtype=torch.int32, device=embedding.device)

    @classmethod
    def of(cls, embedding: Tensor, layers: Sequence[Layer]) -> FewRows | None:
        """None where the GPU cannot, or the layers are not of the shape that these kernels are for."""
        products = [p for layer in layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        fits = all(p.bias is None and p.adapter is None for p in products)
        fits = fits and all(len(p.weight) % (2 * COLUMNS) == 0 and p.weight.shape[1] % DEPTH == 0 for p in products)
        fits = fits and embedding.shape[1] <= MAX_WIDTH
        return cls(embedding, layers) if fits and _can_run(embedding) else None

    def fits(self, tokens: int) -> bool:
        return tokens * self._embedding.shape[1] <= MAX_SIZE

    def __call__(self, ids: Tensor, attend: Callable[[Layer, Tensor], Tensor | None]) -> Tensor:
        """What the layers make of the tokens [rows, width]; they end with one whose attention gives nothing."""
        layers, rows, width = self._layers, len(ids), self._embedding.shape[1]
        x = self._embedding.new_empty(rows, width)
        y = torch.empty_like(x)
        parts = width // tile_for("added", rows, width).columns
        squares = x.new_empty(rows, parts, dtype=torch.float32)
        layer_kernels.embed[(rows,)](
            ids, self._embedding, layers[0].attention_norm.weight, x, y, squares, WIDTH=width,
            BLOCK=triton.next_power_of_2(width), PARTS=parts, PADDED=triton.next_power_of_2(parts), num_warps=4,
        )  # fmt: skip
        for layer, behind in zip(layers, [*layers[1:], None], strict=True):
            qkv = self._normed("qkv", y, squares, layer.qkv.weight, layer.attention_norm)
            out = attend(layer, qkv)
            if out is None:
                break
            self._add(x, out, layer.out.weight, layer.mlp_norm, y, squares)
            gated = self._normed("gated", y, squares, layer.gate_up.weight, layer.mlp_norm)
            next_norm = (
                layer.mlp_norm if behind is None else behind.attention_norm
            )  # after the last layer y is not read
            self._add(x, gated, layer.down.weight, next_norm, y, squares)
        return x

    def _normed(self, kind: str, y: Tensor, squares: Tensor, weight: Tensor, norm: Any) -> Tensor:
        (rows, depth), gated = y.shape, kind == "gated"
        width = weight.shape[0] // (2 if gated else 1)
        tile, out = tile_for(kind, rows, depth), y.new_empty(rows, width)
        layer_kernels.normed_product[(width // tile.columns, -(-rows // tile.rows))](
            y, squares, weight, out, rows, width, norm_epsilon(norm), DEPTH=depth, BM=tile.rows, BN=tile.columns,
            BK=tile.depth, PARTS=squares.shape[1], PADDED=triton.next_power_of_2(squares.shape[1]), GATED=gated,
            num_warps=tile.warps, num_stages=tile.stages, **overlap(self.overlaps),
        )  # fmt: skip
        return out

    def _add(self, x: Tensor, a: Tensor, weight: Tensor, norm: Any, y: Tensor, squares: Tensor) -> None:
        """x += a @ weight.T, and y and squares of the norm behind it."""
        rows, (width, depth) = len(x), weight.shape
        tile = tile_for("added", rows, depth)
        splits = splits_for(tile, width, depth)
        blocks = -(-rows // tile.rows)
        sums = x.new_empty(blocks * tile.rows * width * splits if splits > 1 else 0, dtype=torch.float32)
        layer_kernels.added_product[(width // tile.columns, blocks, splits)](
            a, weight, x, norm.weight, y, squares, sums, self._arrived, rows, width, DEPTH=depth, BM=tile.rows,
            BN=tile.columns, BK=tile.depth, SPLITS=splits, num_warps=tile.warps, num_stages=tile.stages,
            **overlap(self.overlaps),
        )  # fmt: skip


def _can_run(x: Tensor) -> bool:
    """On a GPU in bfloat16 alone: a hidden state that is not scaled yet may be too large for float16."""
    if not x.is_cuda:
        return x.dtype.itemsize == 2  # the interpreter, which has no bfloat16
    properties: Any = torch.cuda.get_device_properties(x.device)
    overlaps = properties.major >= 9 and properties.shared_memory_per_block_optin >= SHARED_MEMORY
    return bool(overlaps) and x.dtype == torch.bfloat16
