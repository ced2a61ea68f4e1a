"""One step on a GPU: prompts and appends as one ragged forward, then several decode steps.

A decode step is a CUDA graph of a bucketed batch size: the fast decoder's forward, or the module's with our
attention over pages. Two kernels then choose the tokens and make every row ready for the next step. The host
looks every few steps whether a row has ended, while the next ones already run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palestra.core.errors import UnsupportedModel
from palestra.core.phases import phases
from palestra.engine.attention import ENGINE_ATTENTION, REMEDY, AttentionSwitch
from palestra.engine.cuda.fast_decoder import CudaFastDecoder
from palestra.engine.cuda.paged_ops import DecodePlan, PrefillPlan
from palestra.engine.cuda.state import DecodeState, padded_tables
from palestra.engine.kv_shape import CacheTooLarge, KVShape
from palestra.engine.sampler import SamplingRow, sample
from palestra.engine.session import Chunk, Collect, Emission, Job, Session
from palestra.engine.supported import can_capture, is_llama_like

BUCKETS = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(slots=True)
class Graph:
    """A decode step of one batch size: replay it, then read the logits."""

    replay: Callable[[], None]
    logits: Tensor


class CudaRunner:
    """Owns the KV pages of one model on a GPU and runs its steps."""

    overlaps = True
    decode_steps = 64  # the most decode steps before the scheduler plans again
    look_every = 8  # steps after which the host looks whether a row has ended

    def __init__(
        self, model: nn.Module, shape: KVShape, pages: int, page_size: int, max_running: int, context: int
    ) -> None:
        if shape.key_dim != shape.value_dim:
            sizes = f"{shape.key_dim} and {shape.value_dim}"
            raise UnsupportedModel(f"keys and values of different widths ({sizes}) have no GPU kernel; {REMEDY}")
        self.model: Any = model
        self.page_size = page_size
        self.context = context
        self.device = next(model.parameters()).device
        self.warm_up_s = 0.0
        self._kv_shape = shape
        self._copies: dict[int, int] = {}  # pages that the next step copies: target -> source
        self.reserve_memory(pages)
        self._switch = AttentionSwitch(model)
        self.fast_decoder = CudaFastDecoder(model, context) if is_llama_like(model) else None
        self._captures = self.device.type == "cuda" and can_capture(model)  # the kernels' interpreter has no graphs
        self._graphs: dict[int, Graph] = {}
        self._graph_pool: Any = None
        self._weights_at = self._weight_addresses()
        self._state = DecodeState(bucket_for(max_running), -(-context // page_size), self.decode_steps, self.device)

    def enter(self, session: Session) -> None:
        """Pages are read in place."""

    def leave(self, session: Session, keep: bool) -> None: ...

    def copy_page(self, source: int, target: int) -> None:
        """With the next step, together: a group of 512 has as many copies, and a launch each would take longer than the
        step. No page changes before, as only steps write."""
        if target in self._copies or source in self._copies:
            self._copy_pages()
        self._copies[target] = source

    def stored_len(self, session: Session) -> int:
        return session.kv_len

    def _copy_pages(self) -> None:
        if self._copies:
            targets, sources = torch.tensor([*self._copies.items()], device=self.device).T
            for store in (self.keys, self.values):
                store.index_copy_(1, targets, store.index_select(1, sources))
            self._copies = {}

    def weights_changed(self) -> None:
        """Captured graphs hold the weights' addresses: capture again if somebody has moved one."""
        moved = self._weight_addresses() != self._weights_at
        if moved:
            self._forget_graphs()
            self._weights_at = self._weight_addresses()
        if self.fast_decoder is not None:
            self.fast_decoder.find_weights() if moved else self.fast_decoder.refresh_adapters()

    def release_memory(self) -> None:
        self._forget_graphs()  # they hold the addresses of the pages
        self._copies = {}
        self.keys = self.values = torch.empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reserve_memory(self, pages: int) -> None:
        s = self._kv_shape
        lead = (s.layers, pages, s.heads, self.page_size)
        try:
            self.keys = torch.zeros((*lead, s.key_dim), dtype=s.dtype, device=self.device)
            self.values = torch.zeros((*lead, s.value_dim), dtype=s.dtype, device=self.device)
        except torch.OutOfMemoryError as error:
            gib = pages * self.page_size * s.bytes_per_token / (1 << 30)
            self.keys = self.values = torch.empty(0)
            raise CacheTooLarge(
                f"the KV cache of {gib:.1f} GiB does not fit on the GPU ({error}); lower model.kv_memory_gib"
            ) from error

    def disable_fast_path(self) -> bool:
        fast_decoder, self.fast_decoder = self.fast_decoder, None
        self._forget_graphs()
        return fast_decoder is not None

    def _weight_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()]

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._graph_pool = None  # gone with the last graph that used it

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Collect:
        """Enqueue the step's work on the device, as far as that needs no answer."""
        decoding = [c for c in chunks if c.count == 1 and c.samples]
        prefills = [c for c in chunks if not (c.count == 1 and c.samples)]
        parts: list[Collect] = []
        self._copy_pages()
        if prefills:
            with phases("prefill"):
                parts.append(self._prefill(prefills))
        if decoding:
            with phases("decode"):
                rows = [SamplingRow.of(c.job) for c in decoding]
                general = any(r.truncates or r.params.repetition_penalty != 1.0 or r.matching is not None for r in rows)
                parts.append(self._decode_once(decoding, rows) if general else self._decode_many(decoding, rows))

        def collect() -> list[Emission]:
            with phases("decode" if decoding else "prefill"):
                return [emission for part in parts for emission in part()]

        return collect

    def _prefill(self, chunks: Sequence[Chunk]) -> Collect:
        plan, ids, positions, ends = self._prefill_plan(chunks)
        if self.fast_decoder is not None:
            logits = self.fast_decoder.prefill(ids, positions, plan, ends)
        else:
            logits = self._module_logits(ids, positions, plan, ends)
        for chunk in chunks:
            chunk.job.session.kv_len += chunk.count
        sampling = [chunk.job for chunk in chunks if chunk.samples]
        return _emitted(sampling, logits, [SamplingRow.of(job) for job in sampling]) if sampling else list

    def _decode_once(self, chunks: Sequence[Chunk], rows: Sequence[SamplingRow]) -> Collect:
        """One decode step whose tokens the general sampler chooses."""
        self._state.load(chunks, rows, self.page_size, self.context)
        logits = self._decode(bucket_for(len(chunks)))[: len(chunks)]
        for chunk in chunks:
            chunk.job.session.kv_len += 1
        return _emitted([chunk.job for chunk in chunks], logits, rows)

    def _decode_many(self, chunks: Sequence[Chunk], rows: Sequence[SamplingRow]) -> Collect:
        """Decode steps until a row ends, at most `decode_steps`; the first two looks' worth at once."""
        state, bucket = self._state, bucket_for(len(chunks))
        blind = any(row.params.stop for row in rows)  # only the host can see a stop string
        steps = state.load(chunks, rows, self.page_size, self.context, self.look_every if blind else self.decode_steps)
        looks: list[Callable[[], bool]] = []

        def enqueue() -> int:
            done = len(looks) * self.look_every
            for step in range(done, min(done + self.look_every, steps)):
                state.choose(self._decode(bucket), bucket, step)
            looks.append(state.look(len(looks)))
            return min(done + self.look_every, steps)

        def collect() -> list[Emission]:
            done = min(len(looks) * self.look_every, steps)
            while done < steps and not looks[-2]():
                done = enqueue()
            emissions = []
            for chunk, (ids, logprobs) in zip(chunks, state.emitted(done), strict=True):
                chunk.job.session.kv_len += len(ids)
                emissions.append(Emission(chunk.job, ids, logprobs))
            return emissions

        if enqueue() < steps:
            enqueue()
        return collect

    def _decode(self, bucket: int) -> Tensor:
        """The logits [bucket, V] of one decode step over the state's first rows."""
        if bucket not in self._graphs:
            started = time.perf_counter()
            self._graphs[bucket] = self._graph(bucket)
            self.warm_up_s += time.perf_counter() - started
        graph = self._graphs[bucket]
        graph.replay()
        return graph.logits

    def _graph(self, bucket: int) -> Graph:
        state = self._state
        plan = DecodePlan(self.keys, self.values, state.tables[:bucket], state.lens[:bucket])

        def forward() -> Tensor:
            if self.fast_decoder is not None:
                return self.fast_decoder.decode(state.ids[:bucket], plan)
            return self._module_logits(state.ids[:bucket], state.positions[:bucket], plan)

        return self._captured(forward) if self._captures else _uncaptured(forward)

    def _captured(self, forward: Callable[[], Tensor]) -> Graph:
        lens = self._state.lens.clone()
        self._state.lens.zero_()  # dead rows while capturing: nothing is written
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            captured = torch.cuda.CUDAGraph()
            # thread_local: the learner may allocate meanwhile in its own thread (rollout.max_staleness)
            with torch.cuda.graph(captured, pool=self._graph_pool, capture_error_mode="thread_local"):
                logits = forward()
        except Exception as error:
            error.add_note(f"A decode step could not be captured as a CUDA graph. To go on without, {REMEDY} (slower)")
            raise
        finally:
            self._state.lens.copy_(lens)
        self._graph_pool = self._graph_pool or captured.pool()
        return Graph(captured.replay, logits)

    def _module_logits(self, ids: Tensor, positions: Tensor, plan: Any, ends: Tensor | int = 0) -> Tensor:
        """[rows, V] logits of the module with our attention, at the places `ends`; 0: at all of them."""
        with self._switch.use(ENGINE_ATTENTION, training=False):
            output = self.model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=ends, plan=plan
            )
        return output.logits[0]

    def _prefill_plan(self, chunks: Sequence[Chunk]) -> tuple[PrefillPlan, Tensor, Tensor, Tensor]:
        page, block = self.page_size, 64 if max(c.count for c in chunks) > 32 else 16
        sessions, counts = [c.job.session for c in chunks], [c.count for c in chunks]
        tables = padded_tables([session.table for session in sessions])
        ids = [i for s, n in zip(sessions, counts, strict=True) for i in s.token_ids[s.kv_len : s.kv_len + n]]
        row_of = np.repeat(np.arange(len(chunks)), counts)
        firsts = np.cumsum([0, *counts[:-1]])
        positions = np.arange(len(ids)) + np.repeat([s.kv_len for s in sessions] - firsts, counts)
        ends = [first + c.count - 1 for first, c in zip(firsts, chunks, strict=True) if c.samples]
        blocks = [(row, start) for row, count in enumerate(counts) for start in range(0, count, block)]

        def put(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=dtype, device=self.device)

        at = put(positions, torch.long)
        plan = PrefillPlan(
            keys=self.keys,
            values=self.values,
            tables=put(tables),
            pages=put(tables[row_of, positions // page], torch.long),
            offsets=at % page,
            block_row=put([row for row, _ in blocks]),
            block_start=put([start for _, start in blocks]),
            row_first=put(firsts),
            row_count=put(counts),
            row_len=put([s.kv_len + n for s, n in zip(sessions, counts, strict=True)]),
            block=block,
        )
        return plan, put(ids, torch.long), at, put(ends, torch.long)


def _uncaptured(forward: Callable[[], Tensor]) -> Graph:
    """A step that runs kernel by kernel each time."""

    def replay() -> None:
        graph.logits = forward()

    graph = Graph(replay, torch.empty(0))
    return graph


def bucket_for(rows: int) -> int:
    """The captured batch size that holds so many rows."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), -(-rows // 256) * 256)


def _emitted(jobs: Sequence[Job], logits: Tensor, rows: Sequence[SamplingRow]) -> Collect:
    tokens, logprobs = sample(logits, rows)

    def collect() -> list[Emission]:
        pairs = zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True)
        return [Emission(job, [token], [logprob]) for job, token, logprob in pairs]

    return collect
