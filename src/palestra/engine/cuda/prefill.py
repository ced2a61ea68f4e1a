"""What a prefill reads on the device: the tokens of prompts and appends, one row after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.core.machine import to_device
from palestra.engine.cuda.exact import ExactPlan
from palestra.engine.cuda.paged_ops import PrefillPlan, padded_tables
from palestra.engine.session import Session

MAX_CAPTURED_TOKENS = 4096  # from there on the GPU takes longer than the host needs to start its kernels
LONG_ROW, LONG_BLOCK, SHORT_BLOCK = 32, 64, 16  # queries that attend together


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
        """The one with room for it that is captured: few shapes, so that most are there already."""
        return self._replace(tokens=max(16, 1 << (self.tokens - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class PrefillArrays:
    """A prefill on the host, as int32."""

    tokens: np.ndarray  # [4, N]: ids, positions, the page of each, and its row
    blocks: np.ndarray  # [2, blocks]: their row, and where they start in it
    rows: np.ndarray  # [3, rows]: the first of its tokens, their number, and the row's length with them
    tables: np.ndarray  # [rows, pages]
    block: int

    @classmethod
    def of(cls, fills: Sequence[Fill], page_size: int) -> PrefillArrays:
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
        return cls(
            tokens=np.array([ids, positions, tables[row_of, positions // page_size], row_of], np.int32),
            blocks=np.array([block_row, starts], np.int32),
            rows=np.array([firsts, counts, lengths + counts], np.int32),
            tables=tables,
            block=block,
        )

    @property
    def shape(self) -> PrefillShape:
        return PrefillShape(self.tokens.shape[1], self.block)

    def to(self, device: torch.device) -> PrefillBuffers:
        arrays = (self.tokens, self.blocks, self.rows, self.tables)
        return PrefillBuffers(*to_device(map(torch.from_numpy, arrays), device))


class PrefillBuffers(NamedTuple):
    """A prefill on the device."""

    tokens: Tensor
    blocks: Tensor
    rows: Tensor
    tables: Tensor

    @classmethod
    def empty(cls, rows: int, table_width: int, device: torch.device) -> PrefillBuffers:
        """For whatever is captured: graphs hold the addresses."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        blocks = MAX_CAPTURED_TOKENS // SHORT_BLOCK + rows
        return cls(zeros(4, MAX_CAPTURED_TOKENS), zeros(2, blocks), zeros(3, rows + 1), zeros(rows + 1, table_width))

    def load(self, arrays: PrefillArrays) -> None:
        """What lies behind the arrays stays harmless: tokens without a page, and blocks of a row without tokens."""
        self.tokens[2].fill_(-1)
        self.blocks.fill_(self.rows.shape[1] - 1)
        for target, source in zip(self, arrays.to(self.tokens.device), strict=True):
            target[: source.shape[0], : source.shape[1]].copy_(source)

    def exact_plan(self, keys: Tensor, values: Tensor, shape: PrefillShape) -> ExactPlan:
        return ExactPlan(keys, values, self.tables, *self.tokens[:, : shape.tokens])

    def plan(self, keys: Tensor, values: Tensor, shape: PrefillShape) -> PrefillPlan:
        """Attention over the first tokens, as many as the shape has."""
        rows = min(shape.tokens, self.rows.shape[1])
        ids, positions, pages, _ = self.tokens[:, : shape.tokens]
        blocks = self.blocks[:, : shape.tokens // shape.block + rows]
        of_rows = (self.rows[0], self.rows[1], self.rows[2])
        return PrefillPlan(
            keys, values, self.tables, ids, positions, pages, blocks[0], blocks[1], *of_rows, block=shape.block
        )
