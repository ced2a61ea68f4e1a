"""What decode steps read and write on the device: rows, draws, stops, chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.engine.cuda import kernels
from palestra.engine.sampler import SamplingRow, uniforms
from palestra.engine.session import Chunk, Job

VOCABULARY_BLOCK = 4096


class DecodeState:
    """What decode steps read and write on the device, allocated once: captured graphs hold its addresses."""

    def __init__(self, rows: int, table_width: int, steps: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows, self.steps = rows, steps
        self.ids = zeros(rows, dtype=torch.long)
        self.positions = zeros(rows, dtype=torch.long)
        self.tables = zeros(rows, table_width)
        self.lens = zeros(rows)
        self.left = zeros(rows)
        self.temperature = torch.ones(rows, device=device)
        self.greedy = zeros(rows)
        self.stops = zeros(rows, 1)
        self.draws = torch.zeros(steps, rows, device=device)
        self.tokens = zeros(steps, rows)
        self.logprobs = torch.zeros(steps, rows, device=device)
        self._stats = torch.empty(0, device=device)
        self._left_on_host = torch.zeros(2, rows, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._loaded = 0

    def load(
        self, chunks: Sequence[Chunk], rows: Sequence[SamplingRow], page_size: int, context: int, steps: int = 1
    ) -> int:
        """Bring the rows onto the device; how many steps, up to `steps`, are worth running."""
        jobs, n = [chunk.job for chunk in chunks], len(chunks)
        sessions = [job.session for job in jobs]
        left = [_tokens_left(job, page_size, context) for job in jobs]
        steps = min(steps, max(left))
        self._loaded = n
        params = [row.params for row in rows]
        tables = padded_tables([s.table for s in sessions])
        self._put(self.tables[:n, : tables.shape[1]], tables)
        self._put(self.ids, [s.token_ids[-1] for s in sessions])
        self._put(self.positions, [s.kv_len for s in sessions])
        self.lens.zero_()
        self.left.zero_()
        self._put(self.lens, [s.kv_len + 1 for s in sessions])
        self._put(self.left, left)
        self._put(self.temperature, [p.temperature or 1.0 for p in params])
        self._put(self.greedy, [int(p.temperature == 0.0) for p in params])
        stops = max(1, *(len(p.stop_token_ids) for p in params)) if params else 1
        if stops > self.stops.shape[1]:
            self.stops = torch.zeros(self.rows, stops, dtype=torch.int32, device=self.stops.device)
        width = self.stops.shape[1]
        self._put(self.stops, [[*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))] for p in params])
        seeds, positions = np.array([p.seed & (1 << 64) - 1 for p in params], np.uint64), [r.position for r in rows]
        self._put(self.draws[:steps, :n], uniforms(seeds, np.asarray(positions) + np.arange(steps)[:, None]))
        return steps

    def look(self, number: int) -> Callable[[], bool]:
        """Ask whether a row has ended, without waiting; call what comes back to wait for the answer."""
        answer = self._left_on_host[number % 2]
        answer.copy_(self.left, non_blocking=True)
        copied = torch.cuda.Event() if self.left.is_cuda else None
        if copied is not None:
            copied.record()

        def ended() -> bool:
            if copied is not None:
                copied.synchronize()
            return not answer[: self._loaded].all()

        return ended

    def emitted(self, steps: int) -> list[tuple[list[int], list[float]]]:
        """The tokens and logprobs of each row's first `steps` steps; a row that ended has fewer."""
        tokens = self.tokens[:steps, : self._loaded].T.cpu().numpy()
        logprobs = self.logprobs[:steps, : self._loaded].T.tolist()
        counts = (tokens >= 0).sum(1).tolist()
        return [(ids[:n], values[:n]) for ids, values, n in zip(tokens.tolist(), logprobs, counts, strict=True)]

    @staticmethod
    def _put(target: Tensor, values: Any) -> None:
        source = torch.from_numpy(np.asarray(values)).to(target.dtype)
        (target if source.shape == target.shape else target[: source.shape[0]]).copy_(source)

    def choose(self, logits: Tensor, bucket: int, step: int) -> None:
        """Choose each row's token from logits [bucket, V] and advance the rows."""
        vocabulary = logits.shape[1]
        blocks = -(-vocabulary // VOCABULARY_BLOCK)
        if self._stats.numel() < self.rows * blocks * 2:
            self._stats = torch.empty(self.rows * blocks * 2, device=logits.device)
        kernels.block_stats[(bucket, blocks)](
            logits, self.temperature, self._stats, vocabulary, blocks, BLOCK=VOCABULARY_BLOCK, num_warps=4
        )
        stops = self.stops.shape[1]
        kernels.choose_and_advance[(bucket,)](
            logits, self._stats, self.temperature, self.greedy, self.draws, self.stops, self.ids, self.positions,
            self.lens, self.left, self.tokens, self.logprobs, vocabulary, blocks, self.rows, stops, step,
            BLOCK=VOCABULARY_BLOCK, NB=1 << (blocks - 1).bit_length(), NS=1 << (stops - 1).bit_length(), num_warps=4,
        )  # fmt: skip


def padded_tables(tables: Sequence[list[int]]) -> np.ndarray:
    """Tables of unlike lengths as one array, with zeros behind the short ones."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), np.int32)
    pages = np.fromiter(chain.from_iterable(tables), np.int32, lengths.sum())
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = pages
    return padded


def _tokens_left(job: Job, page_size: int, context: int) -> int:
    """How many tokens a row may sample before the host must look: its limit, the context, its pages."""
    assert job.params is not None
    session = job.session
    room = len(session.table) * page_size - session.kv_len
    return min(job.params.max_new_tokens - len(job.logprobs), context - len(session.token_ids), room)
