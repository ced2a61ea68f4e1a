"""Speculative decoding by n-grams: where an agent copies what it was told, several tokens come out of one step.

A row's last two tokens are looked for in what stands before them, and the tokens that followed there are drafts of
what comes next. One step computes the row's last token and its drafts. Tokens are then chosen one after the other by
the very numbers that would have chosen them without drafts, and the step goes on as long as the choice is the draft:
so what is sampled does not depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.engine.cuda import kernels, sampling_kernels
from palestra.engine.cuda.paged_ops import (
    RopeAndNorm,
    decode_shape,
    empty_parts,
    pad,
    precision,
    rope_and_store,
    splits_for,
)
from palestra.engine.session import Session

STEP_TOKENS = 4  # of a row in one step: its last one and three drafts
MAX_ROWS = 64  # with more, the products of four times as many tokens take longer than the steps that are saved
HISTORY = 2048  # of a row's last tokens, in which drafts are looked for
MIN_TOKENS_A_STEP = 1.3  # about what a step with drafts costs, in steps without
NOTED_STEPS, PAUSE = 64, 32  # rows' steps that are looked at, and bursts without drafts if they were not worth it


class Speculation:
    """Whether drafts are worth their computation, by how many were right lately, with the same weights."""

    def __init__(self) -> None:
        self._tokens, self._steps, self._pause = 0.0, 0.0, 0

    def is_worth_it(self) -> bool:
        """Asked once for each burst of steps."""
        self._pause = max(0, self._pause - 1)
        return self._pause == 0

    def note(self, tokens: int, steps: int) -> None:
        """Record that `steps` steps of rows gave `tokens` tokens."""
        self._tokens, self._steps = self._tokens / 2 + tokens, self._steps / 2 + steps
        if self._steps >= NOTED_STEPS and self._tokens < MIN_TOKENS_A_STEP * self._steps:
            self._tokens, self._steps, self._pause = 0.0, 0.0, PAUSE


class DraftBuffers:
    """What steps with drafts read and write on the device, allocated once: captured graphs hold its addresses."""

    def __init__(self, rows: int, steps: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.rows = min(rows, MAX_ROWS)
        self.ids, self.drafts, self.positions, self.pages = zeros(4, self.rows * STEP_TOKENS)
        self._of_rows = zeros(2, self.rows)
        self.firsts, self.steps = self._of_rows  # where a row's history begins; steps that it was alive for
        self.history = zeros(self.rows, HISTORY + steps + 1)

    def pairs(self, sessions: Sequence[Session]) -> list[tuple[Tensor, np.ndarray]]:
        """What to `put` where, before the first of their steps."""
        tails = [session.token_ids[-HISTORY:] for session in sessions]
        history = np.zeros((len(tails), max(map(len, tails))), np.int32)
        for row, tail in zip(history, tails, strict=True):
            row[: len(tail)] = tail
        firsts = [len(session.token_ids) - len(tail) for session, tail in zip(sessions, tails, strict=True)]
        of_rows = np.array([firsts, [0] * len(tails)], np.int32)
        return [(self._of_rows, of_rows), (self.history, history)]

    def draft(self, rows: int, tables: Tensor, positions: Tensor, lens: Tensor, left: Tensor, page_size: int) -> None:
        sampling_kernels.draft[(rows,)](
            self.history, self.firsts, tables, positions, lens, left, self.ids, self.drafts, self.positions, self.pages,
            self.history.stride(0), tables.stride(0), K=STEP_TOKENS, PAGE=page_size, BLOCK=1024, num_warps=4,
        )  # fmt: skip


@dataclass(slots=True)
class DraftPlan:
    """Attention of STEP_TOKENS tokens of each row: its last one, which `lens` counts, and its drafts."""

    keys: Tensor  # [layers, pages, KV heads, page, D]
    values: Tensor
    tables: Tensor  # [B, pages of the longest context]
    lens: Tensor  # [B]
    ids: Tensor  # [B * STEP_TOKENS]
    positions: Tensor
    pages: Tensor

    def over_pages(self, layer: int, qkv: Tensor, scale: float, window: int, rope: RopeAndNorm) -> Tensor:
        """qkv [tokens, H + 2 KV, D]: keys and values are stored, and what the queries attend to [tokens, H, D]."""
        keys, values = self.keys[layer], self.values[layer]
        q = rope_and_store(qkv, keys, values, self.pages, self.positions, rope)
        rows, (tokens, heads, dim) = len(self.lens), q.shape
        kv_heads, page = keys.shape[1], keys.shape[2]
        splits = splits_for(rows, kv_heads)
        out = torch.empty_like(q)
        part, part_ml = empty_parts(q, splits)
        keys_at_once, warps, stages = decode_shape(rows, kv_heads)
        kernels.draft_attention[(rows, kv_heads, splits)](
            q, keys, values, self.tables, self.lens, self.pages, out, part, part_ml, self.tables.stride(0), scale, 0.0,
            window, splits, KV=kv_heads, G=heads // kv_heads, N=STEP_TOKENS, M=pad(STEP_TOKENS * heads // kv_heads),
            D=dim, DP=pad(dim), PAGE=page, T=min(keys_at_once, page), WHOLE=splits == 1, SOFTCAP=False,
            WINDOW=window > 0, PRECISION=precision(q.dtype), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            kernels.combine_parts[(tokens * heads,)](
                part, part_ml, self.lens, self.lens, out, splits, splits, H=heads, D=dim, DP=pad(dim), SHARES=False,
                PP=splits, num_warps=1,
            )  # fmt: skip
        return out
