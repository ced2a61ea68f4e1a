"""One step on a GPU: prompts and appends as one ragged forward, then a burst of decode steps.

A decode step is a CUDA graph of a bucketed batch size: the lean forward of plain decoders, or the module
with compiled layers and fused linears; attention over pages, LM head. Two kernels then choose the tokens
and make every row ready for the next step. The host looks every few steps whether a row has ended, while
the next ones already run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from palestra.engine.attention import ENGINE_ATTENTION, AttentionSwitch
from palestra.engine.cpu.kv_slots import KVShape
from palestra.engine.cuda.fast_decoder import CudaLean
from palestra.engine.cuda.fuse import FusedLinears
from palestra.engine.cuda.paged_ops import DecodePlan, FeedPlan
from palestra.engine.cuda.state import DecodeState, padded_tables
from palestra.engine.sampler import SamplingRow, sample
from palestra.engine.session import Chunk, Emission, Job, Session

log = logging.getLogger(__name__)

BUCKETS = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(slots=True)
class Graph:
    """A captured decode step: replay it, then read the logits."""

    replay: Any
    logits: Tensor


class CudaRunner:
    """Owns the KV pages of one model on a GPU and runs its steps."""

    decode_steps = 64  # the most steps of a burst
    look_every = 8

    def __init__(
        self, model: nn.Module, shape: KVShape, pages: int, page_size: int, max_running: int, context: int
    ) -> None:
        self.model: Any = model
        self.page_size = page_size
        self.context = context
        self.device = next(model.parameters()).device
        self.warm_up_s = 0.0
        lead = (shape.layers, pages, shape.heads, page_size)
        self.keys = torch.zeros((*lead, shape.key_dim), dtype=shape.dtype, device=self.device)
        self.values = torch.zeros((*lead, shape.value_dim), dtype=shape.dtype, device=self.device)
        self._switch = AttentionSwitch(model)
        self._fused = FusedLinears(model)
        self.lean = CudaLean.of(model, self._fused, self.keys, self.values, context)
        self._layers = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)]
        self._compiled: dict[nn.Module, Any] = {}
        self._compiles = True
        self._graphs: dict[int, Graph] = {}
        self._graph_pool: Any = None
        self._pointers: list[int] = []
        self._state = DecodeState(bucket_for(max_running), -(-context // page_size), self.decode_steps, self.device)

    def enter(self, session: Session) -> None:
        session.lane = 0

    def leave(self, session: Session, keep: bool) -> None:
        session.lane = -1

    def copy_page(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]

    def weights_changed(self) -> None:
        """Captured graphs hold the weights' addresses: capture again if somebody moved one."""
        with torch.no_grad():
            self._fused.claim()
        if self._graphs and self._addresses() != self._pointers:
            self._forget_graphs()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()]

    def give_up_lean(self) -> bool:
        lean, self.lean = self.lean, None
        self._forget_graphs()
        return lean is not None

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._graph_pool = None  # gone with the last graph that used it

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> list[Emission]:
        """Run the chunks; what each sampling one emitted."""
        singles = [c for c in chunks if c.count == 1 and c.samples]
        feeds = [c for c in chunks if not (c.count == 1 and c.samples)]
        emissions = self._feed(feeds) if feeds else []
        if singles:
            rows = [SamplingRow.of(c.job) for c in singles]
            general = any(r.truncates or r.params.repetition_penalty != 1.0 or r.matching is not None for r in rows)
            emissions += self._single(singles, rows) if general else self._burst(singles, rows)
        return emissions

    def _feed(self, chunks: Sequence[Chunk]) -> list[Emission]:
        plan, ids, positions, ends = self._feed_plan(chunks)
        if self.lean is not None:
            logits = self.lean.feed(ids[0], positions[0], plan, ends)
        else:
            with self._ready(compiled=False):
                logits = self._logits(ids, positions, plan, ends)
        for chunk in chunks:
            chunk.job.session.kv_len += chunk.count
        sampling = [chunk.job for chunk in chunks if chunk.samples]
        return _emitted(sampling, logits, [SamplingRow.of(job) for job in sampling]) if sampling else []

    def _single(self, chunks: Sequence[Chunk], rows: Sequence[SamplingRow]) -> list[Emission]:
        """One decode step whose tokens the general sampler chooses."""
        self._state.load(chunks, rows, self.page_size, self.context)
        logits = self._decode(bucket_for(len(chunks)))[: len(chunks)]
        for chunk in chunks:
            chunk.job.session.kv_len += 1
        return _emitted([chunk.job for chunk in chunks], logits, rows)

    def _burst(self, chunks: Sequence[Chunk], rows: Sequence[SamplingRow]) -> list[Emission]:
        """Decode steps until a row ends or the longest burst is over."""
        state, bucket = self._state, bucket_for(len(chunks))
        blind = any(row.params.stop for row in rows)  # only the host can see a stop string
        steps = state.load(chunks, rows, self.page_size, self.context, self.look_every if blind else self.decode_steps)
        done = 0
        looks: list[Callable[[], bool]] = []
        while done < steps and not (len(looks) > 1 and looks[-2]()):
            for step in range(done, min(done + self.look_every, steps)):
                state.choose(self._decode(bucket), bucket, step)
            done = min(done + self.look_every, steps)
            looks.append(state.look(len(looks)))
        emissions = []
        for chunk, (ids, logprobs) in zip(chunks, state.emitted(done), strict=True):
            chunk.job.session.kv_len += len(ids)
            emissions.append(Emission(chunk.job, ids, logprobs))
        return emissions

    def _decode(self, bucket: int) -> Tensor:
        """The logits [bucket, V] of one decode step over the state's first rows."""
        if bucket not in self._graphs:
            started = time.perf_counter()
            self._graphs[bucket] = self._capture(bucket)
            self.warm_up_s += time.perf_counter() - started
        graph = self._graphs[bucket]
        graph.replay()
        return graph.logits

    def _capture(self, bucket: int) -> Graph:
        lens = self._state.lens.clone()
        try:
            return self._captured(bucket)
        except Exception as error:
            if self.lean is not None or not self._compiles:
                raise
            log.warning("the layers do not compile (%s); they run as they are, slower", error)
            self._compiles = False
            return self._captured(bucket)
        finally:
            self._state.lens.copy_(lens)

    def _captured(self, bucket: int) -> Graph:
        state = self._state
        plan = DecodePlan(state.tables[:bucket], state.lens[:bucket])

        def forward() -> Tensor:
            if self.lean is not None:
                return self.lean.decode(state.ids[:bucket], plan)
            return self._logits(state.ids[None, :bucket], state.positions[None, :bucket], plan)

        if self.device.type != "cuda":  # the kernels' interpreter: no graphs there
            graph = Graph(None, torch.empty(0))
            graph.replay = lambda: self._run_into(graph, forward)
            return graph
        with nullcontext() if self.lean is not None else self._ready(compiled=self._compiles):
            state.lens.zero_()  # dead rows while capturing: nothing is written
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, pool=self._graph_pool):
                logits = forward()
            self._graph_pool = self._graph_pool or captured.pool()
            self._pointers = self._addresses()
        return Graph(captured.replay, logits)

    def _run_into(self, graph: Graph, forward: Any) -> None:
        with self._ready(compiled=False):
            graph.logits = forward()

    def _logits(self, ids: Tensor, positions: Tensor, plan: Any, ends: Tensor | int = 0) -> Tensor:
        """[rows, V] logits at the given places; 0: at all of them."""
        output = self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=ends, plan=plan)
        return output.logits[0]

    @contextmanager
    def _ready(self, compiled: bool) -> Iterator[None]:
        """The model as the engine runs it: its attention, its KV in reach, fused linears, compiled layers."""
        with ExitStack() as stack:
            stack.enter_context(self._switch.use(ENGINE_ATTENTION, training=False))
            stack.enter_context(self._fused.use())
            for module in self._layers:
                layer = module.layer_idx
                module.__dict__["palestra_kv"] = (self.keys[layer], self.values[layer])  # type: ignore[index]
                stack.callback(module.__dict__.pop, "palestra_kv")
            for module in self._compilable() if compiled else ():
                if module not in self._compiled:
                    self._compiled[module] = _compile(module.forward)
                module.__dict__["forward"] = self._compiled[module]
                stack.callback(module.__dict__.pop, "forward")
            yield

    def _compilable(self) -> list[nn.Module]:
        """The decoder layers and the small modules beside them (norm, rotary embedding)."""
        stacks = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.keys.shape[0]]
        if len(stacks) != 1:
            return []
        body = next(m for m in self.model.modules() if any(child is stacks[0] for child in m.children()))
        beside = [m for m in body.children() if m is not stacks[0] and not isinstance(m, nn.Embedding)]
        return [*stacks[0], *beside]

    def _feed_plan(self, chunks: Sequence[Chunk]) -> tuple[FeedPlan, Tensor, Tensor, Tensor]:
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
        plan = FeedPlan(
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
        return plan, put([ids], torch.long), at[None], put(ends, torch.long)


def _compile(function: Any) -> Any:
    """One compile for all buckets; small kernels that do not wait for each other run as one."""
    return torch.compile(function, dynamic=True, options={"combo_kernels": True})


def bucket_for(rows: int) -> int:
    """The captured batch size that holds so many rows."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), -(-rows // 256) * 256)


def _emitted(jobs: Sequence[Job], logits: Tensor, rows: Sequence[SamplingRow]) -> list[Emission]:
    tokens, logprobs = sample(logits, rows)
    pairs = zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True)
    return [Emission(job, [token], [logprob]) for job, token, logprob in pairs]
