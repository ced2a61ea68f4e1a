"""The Triton kernels as attention plans: one for a decode step, one for prefills (prompts and appends)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from palestra.core.machine import to_device
from palestra.engine.attention import AttentionPlan, ScoreRule
from palestra.engine.cuda import kernels
from palestra.engine.session import BLOCK_ROWS, Session, SharedPrefixes

DECODE_PROGRAMS = 512  # about what fills an H200 in one wave; fewer rows are split along their length
MAX_SPLITS, MAX_SHARED_SPLITS = 8, 64
SHARED_KEYS_AT_ONCE = 64
MAX_CAPTURED_TOKENS = 4096  # from there on the GPU takes longer than the host needs to start its kernels
LONG_ROW, LONG_BLOCK, SHORT_BLOCK = 32, 64, 16  # queries that attend together


def padded_tables(tables: Sequence[list[int]]) -> np.ndarray:
    """Page tables of unlike lengths as one array, with zeros behind the short ones."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), np.int32)
    pages = np.fromiter(chain.from_iterable(tables), np.int32, lengths.sum())
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = pages
    return padded


def splits_for(rows: int, kv_heads: int) -> int:
    """Into how many parts a row's pages are cut, a power of two."""
    return _splits(rows * kv_heads, DECODE_PROGRAMS, MAX_SPLITS)


def shared_splits_for(rows: int, kv_heads: int) -> int:
    """Into how many parts a shared prefix is cut, if two to eight rows share each."""
    return _splits(max(1, rows // 4) * kv_heads, 2 * DECODE_PROGRAMS, MAX_SHARED_SPLITS)


def _splits(programs: int, limit: int, most: int) -> int:
    splits = 1
    while splits < most and programs * splits * 2 <= limit:
        splits *= 2
    return splits


def decode_shape(rows: int, kv_heads: int) -> tuple[int, int, int]:
    """(keys per block, warps, stages): small programs if many share a multiprocessor, deep pipelines if few do."""
    return (64, 4, 3) if rows * kv_heads <= DECODE_PROGRAMS else (32, 1, 3)


def _packed(x: Tensor) -> Tensor:
    """[N, heads, D] with whole rows: only the distance between tokens is free."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def pad(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


@dataclass(frozen=True, slots=True)
class RopeAndNorm:
    """What a layer does to queries and keys before they meet: an RMS norm of each head, RoPE, or both."""

    cos: Tensor | None = None  # [positions, D], or fewer columns if only the first of a head are rotated
    sin: Tensor | None = None
    q_norm: nn.Module | None = None  # with a weight [D]
    k_norm: nn.Module | None = None
    epsilon: float = 0.0
    one_plus: bool = False  # the norms multiply by 1 + weight

    def arguments(self, unused: Tensor) -> tuple[Tensor, ...]:
        norms = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        return tuple(unused if x is None else x for x in (self.cos, self.sin, *norms))  # type: ignore[misc]

    @property
    def flags(self) -> dict[str, int]:
        rotated = 0 if self.cos is None else self.cos.shape[1]
        return {"NORM": self.q_norm is not None, "ONE_PLUS": self.one_plus, "ROPE": rotated}


APPLIED_ALREADY = RopeAndNorm()


def empty_parts(q: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Where the parts of queries [N, H, D] go before they are merged: their sums, their maxima and weights."""
    lead = (*q.shape[:2], parts) if parts > 1 else ()  # a single part is not merged
    part, part_ml = (q.new_empty((*lead, width), dtype=torch.float32) for width in (q.shape[2], 2))
    return part, part_ml


def rope_and_store(
    qkv: Tensor, keys: Tensor, values: Tensor, pages: Tensor, positions: Tensor, rope: RopeAndNorm
) -> Tensor:  # fmt: skip
    """Apply RoPE to qkv [N, H + 2 KV, D], store keys and values in their pages, and return the queries [N, H, D]."""
    tokens, heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    q = torch.empty((tokens, heads - 2 * kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
    kernels.rope_and_store[(tokens, heads - kv_heads)](
        qkv, q, keys, values, pages, positions, *rope.arguments(qkv), rope.epsilon, qkv.stride(0),
        H=q.shape[1], KV=kv_heads, D=dim, DP=pad(dim), PAGE=keys.shape[2], num_warps=1, **rope.flags,
    )  # fmt: skip
    return q


@dataclass(slots=True)
class DecodePlan(AttentionPlan):
    """One token for each row. `lens` counts it; 0 is a dead row."""

    keys: Tensor  # [layers, pages, KV heads, page, D]
    values: Tensor
    tables: Tensor  # [B, pages of the longest context]
    lens: Tensor  # [B]
    shared: SharedPrefixes | None = None  # with a sliding window each row reads its own pages all the same
    side: torch.cuda.Stream | None = None  # on which shared prefixes are read, in parallel with each row's own pages

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        layer = self.kv_layer(module)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return self.over_pages(layer, q, k, v, rule.scale, rule.softcap or 0.0, rule.window or 0, sinks=rule.sinks)[
            None
        ]

    def over_pages(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, window: int,
        rope: RopeAndNorm = APPLIED_ALREADY, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [B, H, D], k and v [B, KV, D] of one new token a row -> [B, H, D]; its KV is stored."""
        k, v = _packed(k), _packed(v)
        q = q if q.stride(2) == 1 else q.contiguous()
        keys, values = self.keys[layer], self.values[layer]
        rows, heads, dim = q.shape
        kv_heads, page = keys.shape[1], keys.shape[2]
        shared = self.shared if window == 0 else None
        splits = parts = splits_for(rows, kv_heads)
        if shared is not None:
            parts += shared_splits_for(rows, kv_heads)
        out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
        part, part_ml = empty_parts(q, parts)
        common: dict[str, Any] = {
            "KV": kv_heads, "G": heads // kv_heads, "D": dim, "DP": pad(dim), "PAGE": page,
            "SOFTCAP": softcap > 0, "PRECISION": precision(q.dtype), **rope.flags,
        }  # fmt: skip
        if shared is not None:
            queries = pad(BLOCK_ROWS * heads // kv_heads)
            with _beside(self.side):
                kernels.shared_attention[(len(shared.blocks), kv_heads, parts - splits)](
                    q, keys, values, self.tables, self.lens, *shared, part, part_ml, *rope.arguments(q)[:3],
                    q.stride(0), q.stride(1), self.tables.stride(0), scale, softcap, rope.epsilon, parts - splits,
                    parts, **common, R=BLOCK_ROWS, M=queries, T=min(SHARED_KEYS_AT_ONCE, page),
                    num_warps=4 if queries <= 64 else 8, num_stages=3,
                )  # fmt: skip
        shared_tokens = self.lens if shared is None else shared.tokens  # unused if there is no shared prefix
        keys_at_once, warps, stages = decode_shape(rows, kv_heads)
        kernels.decode_attention[(rows, kv_heads, splits)](
            q, k, v, keys, values, self.tables, self.lens, shared_tokens, out, part, part_ml, *rope.arguments(q),
            q if sinks is None else sinks, q.stride(0), q.stride(1), k.stride(0), v.stride(0), self.tables.stride(0),
            scale, softcap, window, rope.epsilon, splits, parts, **common, GP=pad(heads // kv_heads),
            T=min(keys_at_once, page), WHOLE=parts == 1,
            SHARES=shared is not None, WINDOW=window > 0, SINKS=sinks is not None, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        if shared is not None and self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
        if parts > 1:
            kernels.combine_parts[(rows * heads,)](
                part, part_ml, shared_tokens, self.lens, out, splits, parts, H=heads, D=dim, DP=pad(dim),
                SHARES=shared is not None, PP=1 << (parts - 1).bit_length(), num_warps=1 if parts <= MAX_SPLITS else 4,
            )  # fmt: skip
        return out


@contextmanager
def _beside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch onto another stream, behind all that was launched on this one; on this one if there is no other."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


@dataclass(slots=True)
class PrefillPlan(AttentionPlan):
    """Several tokens of several rows, one row after the other."""

    keys: Tensor  # [layers, pages, KV heads, page, D]
    values: Tensor
    tables: Tensor  # [rows, pages]
    ids: Tensor  # [N]
    positions: Tensor  # [N]
    pages: Tensor  # [N] page of each token; -1: its KV is stored nowhere
    block_row: Tensor  # [blocks]
    block_start: Tensor  # [blocks]
    row_first: Tensor  # [rows]
    row_count: Tensor  # [rows]
    row_len: Tensor  # [rows], the new tokens included
    block: int

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        layer = self.kv_layer(module)
        keys, values = self.keys[layer], self.values[layer]
        heads = torch.arange(keys.shape[1], device=k.device)
        pages, offsets = self.pages.long(), self.positions.long() % keys.shape[2]
        for store, new in ((keys, k), (values, v)):
            store[pages[:, None], heads, offsets[:, None]] = new[0].transpose(0, 1)
        return self.over_pages(q[0].transpose(0, 1).contiguous(), keys, values, *rule)[None]

    def over_pages(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of queries [N, H, D] over pages that hold their own tokens already -> [N, H, D]."""
        out = torch.empty_like(q)
        _, n_heads, dim = q.shape
        kernels.prefill_attention[(self.block_row.shape[0], n_heads)](
            q, keys, values, self.tables, self.block_row, self.block_start, self.row_first, self.row_count,
            self.row_len, out, q if sinks is None else sinks, self.tables.stride(0), scale, softcap or 0.0, window or 0,
            H=n_heads, KV=keys.shape[1], D=dim, DP=pad(dim), PAGE=keys.shape[2], M=self.block,
            SOFTCAP=bool(softcap), WINDOW=bool(window), SINKS=sinks is not None, PRECISION=precision(q.dtype),
            num_warps=4, num_stages=2,
        )  # fmt: skip
        return out


class Fill(NamedTuple):
    """Compute the KV of a session's next tokens."""

    session: Session
    tokens: int


class PrefillShape(NamedTuple):
    """The tokens of a prefill, and how many of them attend together."""

    tokens: int
    block: int

    @property
    def captured(self) -> PrefillShape:
        """The captured shape that holds this one: there are few, so most have been captured before."""
        return self._replace(tokens=max(16, 1 << (self.tokens - 1).bit_length()))


class PrefillBuffers(NamedTuple):
    """The tokens of prompts and appends, one row after the other, as int32: arrays on the host, or device tensors."""

    tokens: Any  # [4, N]: ids, positions, the page of each, and its row
    blocks: Any  # [2, blocks]: their row, and where they start in it
    rows: Any  # [3, rows]: the first of its tokens, their number, and the row's length with them
    tables: Any  # [rows, pages]

    @classmethod
    def of(cls, fills: Sequence[Fill], page_size: int) -> tuple[PrefillBuffers, PrefillShape]:
        """The arrays of a prefill, and their shape."""
        sessions, counts = [fill.session for fill in fills], np.array([fill.tokens for fill in fills])
        lengths = np.array([session.kv_len for session in sessions])
        block = LONG_BLOCK if counts.max() > LONG_ROW else SHORT_BLOCK
        tables = padded_tables([session.table for session in sessions])
        ids = [i for session, n in fills for i in session.token_ids[session.kv_len : session.kv_len + n]]
        firsts = np.cumsum(counts) - counts
        row_of = np.repeat(np.arange(len(fills)), counts)
        positions = np.arange(len(ids)) + np.repeat(lengths - firsts, counts)
        blocks = -(-counts // block)
        block_row = np.repeat(np.arange(len(fills)), blocks)
        starts = block * (np.arange(len(block_row)) - np.repeat(np.cumsum(blocks) - blocks, blocks))
        tokens = np.array([ids, positions, tables[row_of, positions // page_size], row_of], np.int32)
        of_rows = np.array([firsts, counts, lengths + counts], np.int32)
        arrays = cls(tokens, np.array([block_row, starts], np.int32), of_rows, tables)
        return arrays, PrefillShape(len(ids), block)

    @classmethod
    def empty(cls, rows: int, table_width: int, device: torch.device) -> PrefillBuffers:
        """Tensors for captured prefills: graphs hold their addresses."""
        blocks = MAX_CAPTURED_TOKENS // SHORT_BLOCK + rows
        shapes = (4, MAX_CAPTURED_TOKENS), (2, blocks), (3, rows + 1), (rows + 1, table_width)
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))

    def to(self, device: torch.device) -> PrefillBuffers:
        return PrefillBuffers(*to_device(map(torch.from_numpy, self), device))

    def load(self, arrays: PrefillBuffers) -> None:
        """Copy arrays into these tensors. The rest stays harmless: tokens without a page, blocks of an empty row."""
        self.tokens[2].fill_(-1)
        self.blocks.fill_(self.rows.shape[1] - 1)
        for target, source in zip(self, arrays.to(self.tokens.device), strict=True):
            target[: source.shape[0], : source.shape[1]].copy_(source)

    def plan(self, keys: Tensor, values: Tensor, shape: PrefillShape) -> PrefillPlan:
        """Attention over the first `shape.tokens` tokens."""
        rows = min(shape.tokens, self.rows.shape[1])
        ids, positions, pages, _ = self.tokens[:, : shape.tokens]
        blocks = self.blocks[:, : shape.tokens // shape.block + rows]
        of_rows = (self.rows[0], self.rows[1], self.rows[2])
        return PrefillPlan(
            keys, values, self.tables, ids, positions, pages, blocks[0], blocks[1], *of_rows, block=shape.block
        )
