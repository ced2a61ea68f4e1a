"""The rows, draws, stops and chosen tokens of decode steps on the device, and the kernels that choose tokens.

Tokens are chosen and recorded without a host sync.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.core.machine import put
from palestra.engine.cuda.paged_ops import padded_tables
from palestra.engine.sampler import uniforms
from palestra.engine.session import BLOCK_ROWS, Chunk, Job, SharedPrefixes

VOCABULARY_BLOCK = 4096
MAX_STOPS = 8  # stop ids a row at first; more need other buffers


class DecodeState:
    """Device tensors that decode steps read and write, allocated once: captured graphs hold their addresses.

    The host's values of each row are one array, so that one copy brings them.
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
        """The prefixes that the first `rows` share; blocks have two rows or more."""
        return SharedPrefixes(self._shared.tokens[:rows], self._shared.blocks[: rows // 2])

    def load(
        self, chunks: Sequence[Chunk], shared: SharedPrefixes | None, page_size: int, context: int, steps: int = 1
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
        block_stats[(rows, blocks)](
            logits, self.temperature, self._stats, vocabulary, blocks, BLOCK=VOCABULARY_BLOCK, num_warps=4
        )
        choose_and_advance[(rows,)](
            logits, self._stats, self.temperature, self.greedy, self.draws, self.stops, self.ids, self.starts,
            self.positions, self.lens, self.left, self.tokens, self.logprobs, vocabulary, blocks, self.rows,
            self.max_stops, BLOCK=VOCABULARY_BLOCK, NB=1 << (blocks - 1).bit_length(),
            NS=1 << (self.max_stops - 1).bit_length(), num_warps=4,
        )  # fmt: skip


def _tokens_left(job: Job, page_size: int, context: int) -> int:
    """Tokens that a row may sample before the host must look: by its limit, the context and its pages."""
    assert job.params is not None
    session = job.session
    room = len(session.table) * page_size - session.kv_len
    return min(job.params.max_new_tokens - len(job.logprobs), context - len(session.token_ids), room)


@triton.jit
def block_stats(LOGITS, TEMPERATURE, STATS, vocabulary, blocks, BLOCK: tl.constexpr):
    """Maximum and sum of exponentials of each block of logits; grid (rows, blocks)."""
    b, i = tl.program_id(0), tl.program_id(1)
    at = i * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(TEMPERATURE + b)
    x = tl.load(LOGITS + b.to(tl.int64) * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    x = x / temperature
    top = tl.max(x, 0)
    tl.store(STATS + (b * blocks + i) * 2, top)
    tl.store(STATS + (b * blocks + i) * 2 + 1, tl.sum(tl.exp(x - top), 0))


@triton.jit
def _masses(STATS, at_row, blocks, NB: tl.constexpr):
    """Of each block of a row its maximum and its mass, both for all blocks: (maxima, highest of them, masses, sum)."""
    i = tl.arange(0, NB)
    real = i < blocks
    tops = tl.load(STATS + (at_row * blocks + i) * 2, mask=real, other=-float("inf"))
    sums = tl.load(STATS + (at_row * blocks + i) * 2 + 1, mask=real, other=0.0)
    top = tl.max(tops, 0)
    mass = tl.where(real & (tops > -float("inf")), sums * tl.exp(tops - top), 0.0)
    return tops, top, mass, tl.sum(mass, 0)


@triton.jit
def score(LOGITS, STATS, TEMPERATURE, TARGET, LOGPROB, LSE, vocabulary, blocks, NB: tl.constexpr):
    """The logprob of each row's TARGET, to the bit as if it had been chosen; grid (rows,)."""
    b = tl.program_id(0)
    _, top, _, total = _masses(STATS, b, blocks, NB)
    chosen = tl.load(LOGITS + b.to(tl.int64) * vocabulary + tl.load(TARGET + b)).to(tl.float32)
    tl.store(LOGPROB + b, chosen / tl.load(TEMPERATURE + b) - top - tl.log(total))
    tl.store(LSE + b, top + tl.log(total))


@triton.jit
def _choose(
    LOGITS, STATS, at_row, temperature, greedy, draw, vocabulary, blocks, BLOCK: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """A token by inverse CDF from one row of logits, and its logprob."""
    i, t = tl.arange(0, NB), tl.arange(0, BLOCK)
    tops, top, mass, total = _masses(STATS, at_row, blocks, NB)
    target = draw * total
    reached = tl.cumsum(mass, 0)
    block = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), blocks - 1)
    # masses and cumulative sums are rounded differently, so a draw may land past the last block or token that has any
    # probability; then the most likely one is taken
    empty = tl.sum(tl.where(i == block, mass, 0.0), 0) == 0.0
    block = tl.where(greedy | empty, tl.argmax(tops, 0), block)  # one block holds the token
    before = tl.sum(tl.where(i < block, mass, 0.0), 0)
    base = LOGITS + at_row.to(tl.int64) * vocabulary
    at = block * BLOCK + t
    x = tl.load(base + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32) / temperature
    weights = tl.exp(x - top)
    drawn = tl.sum((tl.cumsum(weights, 0) <= target - before).to(tl.int32), 0)
    impossible = tl.sum(tl.where(t == drawn, weights, 0.0), 0) == 0.0
    token = tl.minimum(block * BLOCK + tl.where(greedy | impossible, tl.argmax(x, 0), drawn), vocabulary - 1)
    chosen = tl.load(base + token).to(tl.float32) / temperature
    return token, chosen - top - tl.log(total)


@triton.jit(do_not_specialize=["stops"])
def choose_and_advance(
    LOGITS, STATS, TEMPERATURE, GREEDY, DRAWS, STOPS, IDS, STARTS, POSITIONS, LENS, LEFT, TOKENS, LOGPROBS,
    vocabulary, blocks, rows, stops,
    BLOCK: tl.constexpr, NB: tl.constexpr, NS: tl.constexpr,
):  # fmt: skip
    """Choose and record each row's token, and prepare the row for its next step; grid (rows,).

    A row continues while it has tokens LEFT and none of its STOPS came; a dead row records nothing. Its step is its
    distance from STARTS, so that the same captured kernel serves every step.
    """
    b = tl.program_id(0)
    left = tl.load(LEFT + b)
    position = tl.load(POSITIONS + b)
    temperature = tl.load(TEMPERATURE + b)
    greedy = tl.load(GREEDY + b) != 0
    s = tl.arange(0, NS)
    stop_ids = tl.load(STOPS + s * rows + b, mask=s < stops, other=-1)
    token = tl.load(IDS + b)
    if left > 0:
        step = position - tl.load(STARTS + b)
        draw = tl.load(DRAWS + step * rows + b)
        token, logprob = _choose(LOGITS, STATS, b, temperature, greedy, draw, vocabulary, blocks, BLOCK, NB)
        tl.store(TOKENS + step * rows + b, token)
        tl.store(LOGPROBS + step * rows + b, logprob)
        stopped = tl.sum((stop_ids == token).to(tl.int32), 0) > 0
        left = tl.where(stopped, 0, left - 1)
        position = tl.where(left > 0, position + 1, position)
    tl.store(LEFT + b, tl.maximum(left, 0))
    tl.store(LENS + b, tl.where(left > 0, position + 1, 0))
    if left > 0:
        tl.store(IDS + b, token)
        tl.store(POSITIONS + b, position)
