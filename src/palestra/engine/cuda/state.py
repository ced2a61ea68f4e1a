"""What decode steps read and write on the device: rows, draws, stops, chosen tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from palestra.core.machine import put
from palestra.engine.cuda import sampling_kernels
from palestra.engine.cuda.paged_ops import padded_tables
from palestra.engine.pages import BLOCK_ROWS, SharedArrays, SharedPrefixes
from palestra.engine.sampler import uniforms
from palestra.engine.session import Chunk, Job

VOCABULARY_BLOCK = 4096
MAX_STOPS = 8  # stop ids a row at first; more need other buffers


class DecodeState:
    """What decode steps read and write on the device, allocated once: captured graphs hold its addresses.

    What the host says of each row is one array, so that it comes in one copy.
    """

    def __init__(self, rows: int, table_width: int, steps: int, device: torch.device, stops: int = MAX_STOPS) -> None:
        self.rows, self.max_stops = rows, stops
        self.device = device
        self._of_rows = torch.zeros((9 + stops, rows), dtype=torch.int32, device=device)
        self.ids, self.starts, self.positions, self.lens, self.left, self.greedy = self._of_rows[:6]
        bits, shared, self.slots = self._of_rows[6:9]  # slots of recurrent states: 0 for a padding row
        self.temperature = bits.view(torch.float32)
        self.stops = self._of_rows[9:]
        self._shared = SharedPrefixes(shared, torch.full((rows // 2, BLOCK_ROWS), -1, dtype=torch.int32, device=device))
        self.tables = torch.zeros((rows, table_width), dtype=torch.int32, device=device)
        self.draws = torch.zeros((steps, rows), device=device)
        self._chosen = torch.zeros((2, steps, rows), dtype=torch.int32, device=device)
        self.tokens, self.logprobs = self._chosen[0], self._chosen[1].view(torch.float32)
        self._stats = torch.empty(0, device=device)
        self._left_on_host = torch.zeros((2, rows), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._seeds, self._drawn_from = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def shared(self, rows: int) -> SharedPrefixes:
        """What the first `rows` read together; blocks have two rows or more."""
        return SharedPrefixes(self._shared.tokens[:rows], self._shared.blocks[: rows // 2])

    def load(
        self, chunks: Sequence[Chunk], shared: SharedArrays | None, page_size: int, context: int, steps: int = 1
    ) -> int:
        """Copy the rows to the device; return the number of steps, up to `steps`, that are worth running."""
        jobs = [chunk.job for chunk in chunks]
        params = [job.params for job in jobs if job.params is not None]  # all of them sample
        sessions = [job.session for job in jobs]
        left = [_tokens_left(job, page_size, context) for job in jobs]
        at = np.array([session.kv_len for session in sessions], np.int32)
        words = np.full((len(self._of_rows), len(jobs)), -1, np.int32)
        words[:6] = [s.token_ids[-1] for s in sessions], at, at, at + 1, left, [p.temperature == 0.0 for p in params]
        words[6] = np.array([p.temperature or 1.0 for p in params], np.float32).view(np.int32)
        words[7] = 0 if shared is None else shared.tokens
        words[8] = [max(session.state, 0) for session in sessions]
        for stop_ids in {p.stop_token_ids for p in params}:  # nearly always the same for all
            where = [p.stop_token_ids == stop_ids for p in params]
            words[9 : 9 + len(stop_ids), where] = np.array(stop_ids, np.int32)[:, None]
        self._of_rows.zero_()
        self.tokens.fill_(-1)
        pairs = [(self._of_rows, words), (self.tables, padded_tables([session.table for session in sessions]))]
        if shared is not None:
            self._shared.blocks.fill_(-1)
            pairs.append((self._shared.blocks, shared.blocks))
        put(*pairs)
        self._seeds = np.array([p.seed & (1 << 64) - 1 for p in params], np.uint64)
        self._drawn_from = np.array([len(session.token_ids) for session in sessions])
        return min(steps, max(left))

    def draw(self, first: int, end: int) -> None:
        """The random numbers of some steps."""
        numbers = uniforms(self._seeds, self._drawn_from + np.arange(first, end)[:, None])
        put((self.draws[first:end], numbers))

    def poll_finished(self, number: int) -> Callable[[], bool]:
        """Start a check whether a row has ended; call the returned function to wait for the result."""
        answer = self._left_on_host[number % 2]
        answer.copy_(self.left, non_blocking=True)
        copied = torch.cuda.Event() if self.left.is_cuda else None
        if copied is not None:
            copied.record()

        def ended() -> bool:
            if copied is not None:
                copied.synchronize()
            return not answer[: len(self._seeds)].all()

        return ended

    def emitted(self, steps: int) -> list[tuple[list[int], list[float]]]:
        """The tokens and logprobs of each row's first `steps` steps; a row that ended has fewer."""
        chosen = self._chosen[:, :steps, : len(self._seeds)].transpose(1, 2).cpu().numpy()
        counts = (chosen[0] >= 0).sum(1).tolist()
        both = zip(chosen[0].tolist(), chosen[1].view(np.float32).tolist(), counts, strict=True)
        return [(ids[:n], logprobs[:n]) for ids, logprobs, n in both]

    def choose(self, logits: Tensor) -> None:
        """Choose each row's token from logits [rows, V] and advance the rows."""
        rows, vocabulary = logits.shape
        blocks = -(-vocabulary // VOCABULARY_BLOCK)
        if self._stats.numel() < self.rows * blocks * 2:
            self._stats = torch.empty(self.rows * blocks * 2, device=logits.device)
        sampling_kernels.block_stats[(rows, blocks)](
            logits, self.temperature, self._stats, vocabulary, blocks, BLOCK=VOCABULARY_BLOCK, num_warps=4
        )
        sampling_kernels.choose_and_advance[(rows,)](
            logits, self._stats, self.temperature, self.greedy, self.draws, self.stops, self.ids, self.starts,
            self.positions, self.lens, self.left, self.tokens, self.logprobs, vocabulary, blocks, self.rows,
            self.max_stops, BLOCK=VOCABULARY_BLOCK, NB=1 << (blocks - 1).bit_length(),
            NS=1 << (self.max_stops - 1).bit_length(), num_warps=4,
        )  # fmt: skip


def _tokens_left(job: Job, page_size: int, context: int) -> int:
    """How many tokens a row may sample before the host must look: its limit, the context, its pages."""
    assert job.params is not None
    session = job.session
    room = len(session.table) * page_size - session.kv_len
    return min(job.params.max_new_tokens - len(job.logprobs), context - len(session.token_ids), room)
