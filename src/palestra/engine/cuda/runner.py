"""One step on a GPU: the KV of prompts and appends in one ragged forward, then several decode steps.

Prefill leaves the last token of a row to the decode steps, so that sessions with a new prompt or tool result join the
decode batch without a forward of their own. A decode step is a CUDA graph of a bucketed batch size: the forward of the
fast or the hybrid decoder, or the module's with our attention over pages and our steps of recurrent layers, then two
kernels that choose the tokens and prepare every row for the next step. The host polls every few steps whether a row has
finished, while the next steps already run. Prefills of few tokens are captured as well, because launching their kernels
takes longer than running them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from palestra.core.errors import UnsupportedModel
from palestra.core.machine import capture, lacks_memory, phases, to_device
from palestra.engine.attention import ENGINE_ATTENTION, AttentionSwitch
from palestra.engine.cuda.exact import ExactPlan
from palestra.engine.cuda.fast_decoder import CudaFastDecoder
from palestra.engine.cuda.paged_ops import (
    MAX_CAPTURED_TOKENS,
    DecodePlan,
    Fill,
    PrefillBuffers,
    PrefillPlan,
    PrefillShape,
)
from palestra.engine.cuda.recurrent_steps import MAX_RUN, HybridDecoder, RecurrentStep, StateRows
from palestra.engine.cuda.state import DecodeState
from palestra.engine.recurrent import NO_STEPS, RecurrentLayers, RecurrentSteps, Run, StateStore, over_runs, runs_of
from palestra.engine.routing import ExpertRouting
from palestra.engine.runner import KVMemory, Runner
from palestra.engine.sampler import SamplingRow, sample
from palestra.engine.session import MIN_SAVED_BYTES, Chunk, Collect, Emission, SharedPrefixes, no_emissions
from palestra.engine.supported import NO_EXACT, CacheTooLarge, KVShape, base_model, can_capture, is_llama_like

log = logging.getLogger("palestra")
BUCKETS = (2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class DecodeShape(NamedTuple):
    """The rows of a decode step, and how they are computed."""

    rows: int
    path: Literal["per_row", "shared_prefix"]  # each row reads all its pages, or groups read common pages once


class CudaRunner(Runner, KVMemory):
    """Owns the KV pages of one model on a GPU and runs its steps."""

    overlaps = True
    decode_steps = 64  # the most decode steps before the scheduler plans again
    poll_interval = 4  # decode steps between two checks whether a row has finished

    def __init__(
        self,
        model: nn.Module,
        shape: KVShape,
        pages: int,
        page_size: int,
        max_running: int,
        context: int,
        exact: bool = False,
        state_slots: int = 0,
        routing: ExpertRouting | None = None,
    ) -> None:
        if exact and not is_llama_like(model):
            raise UnsupportedModel(f"model.exact has no kernels for {type(base_model(model)).__name__}; {NO_EXACT}")
        assert shape.key_dim == shape.value_dim, "the kernels know one width; see KVShape.of_one_width"
        self.model: Any = model
        self.page_size = page_size
        self.context = context
        self.device = next(model.parameters()).device
        self._kv_shape = shape
        self._copies: dict[int, int] = {}  # pages that the next step copies: target -> source
        self._recurrent = RecurrentLayers(model)
        self._state_slots = state_slots
        self.states = StateStore(shape.states, 0, partial(torch.zeros, device=self.device))
        self.reserve_memory(pages)
        self._switch = AttentionSwitch(model)
        self.memory = self
        self.fast_decoder = CudaFastDecoder(model, context, exact) if is_llama_like(model) else None
        self._exact = self.fast_decoder if exact else None  # computes every step, by the kernels of `exact`
        self.paths = ["per_row"] if exact else ["per_row", "shared_prefix"]
        steps = {module: RecurrentStep.of(module) for module in self._recurrent.modules}
        self.recurrent_steps = {module: step for module, step in steps.items() if step is not None}
        complete = len(self.recurrent_steps) == len(steps) > 0
        self.hybrid_decoder = HybridDecoder.of(model, context, self.recurrent_steps) if complete else None
        self._captures = self.device.type == "cuda" and can_capture(model)  # the kernels' interpreter has no graphs
        # Replays a decode step of one batch size, or a prefill of one shape, and returns its logits, if any.
        self._graphs: dict[DecodeShape | PrefillShape, Callable[[], Tensor | None]] = {}
        self._graph_pool: Any = None
        self._side = torch.cuda.Stream(self.device) if self._captures else None
        self._weights_at = self._weight_addresses()
        rows, width = bucket_for(max_running), -(-context // page_size)
        self._state = DecodeState(rows, width, self.decode_steps, self.device)
        self._fills = PrefillBuffers.empty(rows, width, self.device)
        self._routing = routing
        self._pass_routing: Tensor | None = None  # [T, layers, k] of the last pass
        if routing is not None:
            # The experts of decode steps, by step and row. Rows that have ended write behind the last step.
            lead = (self.decode_steps + 1, rows)
            shape_of_token = (routing.layers, routing.per_token)
            self._routed = torch.zeros((*lead, *shape_of_token), dtype=routing.dtype, device=self.device)

    def copy_page(self, source: int, target: int) -> None:
        """Copy with the next step. Forking a group of 512 makes as many copies; launching each would take longer than
        the step. Deferring is safe because only steps write pages."""
        # A copy that reads or overwrites the target of a pending one has to run after it.
        if target in self._copies or source in self._copies:
            self._copy_pages()
        self._copies[target] = source

    def _copy_pages(self) -> None:
        if self._copies:
            targets, sources = torch.tensor([*self._copies.items()], device=self.device).T
            for store in (self.keys, self.values):
                store.index_copy_(1, targets, store.index_select(1, sources))
            self._copies = {}

    def weights_changed(self) -> None:
        """Drop captured graphs if a weight has moved, since they hold the weights' addresses."""
        moved = self._weight_addresses() != self._weights_at
        if moved:
            self._forget_graphs()
            self._weights_at = self._weight_addresses()
        decoders: list[Any] = [*self.recurrent_steps.values(), self.fast_decoder, self.hybrid_decoder]
        for decoder in decoders:
            if decoder is not None:
                decoder.find_weights() if moved else decoder.refresh_adapters()

    def release_memory(self) -> None:
        self._forget_graphs()  # they hold the addresses of the pages
        self._copies = {}
        self.keys = self.values = torch.empty(0)
        self.states.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reserve_memory(self, pages: int) -> None:
        s = self._kv_shape
        lead = (s.layers, pages, s.heads, self.page_size)
        try:
            self.keys = torch.zeros((*lead, s.key_dim), dtype=s.dtype, device=self.device)
            self.values = torch.zeros((*lead, s.value_dim), dtype=s.dtype, device=self.device)
            self.states.reserve(self._state_slots)
        except torch.OutOfMemoryError as error:
            gib = pages * self.page_size * s.bytes_per_token / (1 << 30)
            self.keys = self.values = torch.empty(0)
            raise CacheTooLarge(
                f"the KV cache of {gib:.1f} GiB does not fit on the GPU ({error}); lower model.kv_memory_gib"
            ) from error

    def disable_fast_path(self) -> bool:
        if self._exact is not None:
            return False
        was_on = self.fast_decoder is not None or bool(self.recurrent_steps)
        self.fast_decoder = self.hybrid_decoder = None
        self.recurrent_steps = {}
        self._forget_graphs()
        return was_on

    def _weight_addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self.model.parameters()]

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._graph_pool = None  # gone with the last graph that used it

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> Collect:
        """Enqueue the step's work on the device, as far as that needs no answer."""
        fills = [Fill(c.job.session, c.count - c.samples) for c in chunks if c.count > c.samples]
        decoding = [c for c in chunks if c.samples]
        self._copy_pages()
        if fills:
            with phases("prefill"):
                self._prefill(fills)
        for chunk in chunks:
            if chunk.snapshot is not None:
                self.states.copy(chunk.job.session.state, chunk.snapshot)
        if not decoding:
            return no_emissions
        with phases("decode"):
            others_wait = any(c.job.params is None for c in chunks)  # for a prompt that this step computes
            # What the sampling kernels do not know (truncation, penalties, grammars) is sampled by torch, one step at
            # a time.
            if all(c.job.only_temperature for c in decoding):
                read = self._decode_many(decoding, others_wait)
            else:
                read = self._decode_once(decoding)

        def collect(until_one_ends: bool) -> list[Emission]:
            with phases("decode"):
                return read(until_one_ends)

        return collect

    def _prefill(self, fills: Sequence[Fill]) -> None:
        arrays, shape = PrefillBuffers.of(fills, self.page_size)
        if self.fast_decoder is not None and shape.tokens <= MAX_CAPTURED_TOKENS:
            self._fills.load(arrays)
            self._replay(shape.captured, partial(self._prefill_step, self._fills, shape.captured))
        else:
            buffers, counts = arrays.to(self.device), [count for _, count in fills]
            # Recurrent layers compute runs by their own forwards, or by our kernels.
            ours = len(self.recurrent_steps) if max(counts) <= MAX_RUN else 0
            states, runs, steps = [session.state for session, _ in fills], list[Run](), NO_STEPS
            if ours < len(self._recurrent.modules):
                runs = runs_of(list(zip(states, counts, strict=True)), self.device)
            if ours:
                [slots] = to_device([torch.tensor(states, dtype=torch.int32)], self.device)
                steps = self._steps_of(StateRows(slots, buffers.rows[1], buffers.rows[0], buffers.tokens[3]))
            self._prefill_step(buffers, shape, runs, steps)
            if self._routing is not None:  # in host memory when the step is collected
                routed = self._pass_routing
                assert routed is not None
                on_host = torch.empty(routed.shape, dtype=routed.dtype, pin_memory=self.device.type == "cuda")
                on_host.copy_(routed, non_blocking=True)
                for (session, _), rows in zip(fills, on_host.split(counts), strict=True):
                    if session.routing is not None:
                        session.routing.add(session.kv_len, rows)
        for session, count in fills:
            session.kv_len += count

    def _prefill_step(
        self, buffers: PrefillBuffers, shape: PrefillShape, runs: Sequence[Run] = (), steps: RecurrentSteps = NO_STEPS
    ) -> None:
        if self._exact is not None:
            tokens = buffers.tokens[:, : shape.tokens]
            self._exact.prefill_exact(ExactPlan(self.keys, self.values, buffers.tables, *tokens))
            return
        plan = buffers.plan(self.keys, self.values, shape)
        if self.fast_decoder is not None:
            self.fast_decoder.prefill(plan)
        else:
            self._module_logits(plan, plan.ids, plan.positions, runs, steps)

    def _record_decoded(self, chunks: Sequence[Chunk], counts: Sequence[int]) -> None:
        """Give the sessions the experts of the tokens that their last decode steps computed."""
        rows = self._routed[: max(counts), : len(chunks)].transpose(0, 1).contiguous().cpu()
        for chunk, count, own in zip(chunks, counts, rows, strict=True):
            session = chunk.job.session
            if session.routing is not None:
                session.routing.add(session.kv_len - count, own[:count])

    def _decode_once(self, chunks: Sequence[Chunk]) -> Collect:
        """One decode step whose tokens the general sampler chooses."""
        rows = [SamplingRow.of(chunk.job) for chunk in chunks]
        shape, _ = self._load(chunks, 1)
        tokens, logprobs = sample(self._decode(shape)[: len(chunks)], rows)
        for chunk in chunks:
            chunk.job.session.kv_len += 1

        def collect(until_one_ends: bool) -> list[Emission]:
            if self._routing is not None:
                self._record_decoded(chunks, [1] * len(chunks))
            triples = zip(chunks, tokens.tolist(), logprobs.tolist(), strict=True)
            return [Emission(chunk.job, [token], [logprob]) for chunk, token, logprob in triples]

        return collect

    def _decode_many(self, chunks: Sequence[Chunk], others_wait: bool) -> Collect:
        """Run decode steps until a row finishes, at most `decode_steps`.

        Two poll intervals are enqueued at first. From then on `collect` waits for the last but one interval before it
        enqueues the next, so that the GPU always has one interval of work left while the host reads the flags.
        """
        blind = any(c.job.params.stop for c in chunks if c.job.params)  # stop strings are checked on the host alone
        most = self.poll_interval if blind or others_wait else self.decode_steps
        shape, steps = self._load(chunks, most)
        state, polls = self._state, list[Callable[[], bool]]()

        def enqueue() -> int:
            done = len(polls) * self.poll_interval
            end = min(done + self.poll_interval, steps)
            state.draw(done, end)
            for _ in range(done, end):
                self._decode(shape)
            polls.append(state.poll_finished(len(polls)))
            return end

        def collect(until_one_ends: bool) -> list[Emission]:
            done = min(len(polls) * self.poll_interval, steps)
            while until_one_ends and done < steps and not polls[-2]():
                done = enqueue()
            emissions = []
            emitted = state.emitted(done)
            for chunk, (ids, logprobs) in zip(chunks, emitted, strict=True):
                chunk.job.session.kv_len += len(ids)
                emissions.append(Emission(chunk.job, ids, logprobs))
            if self._routing is not None:
                self._record_decoded(chunks, [len(ids) for ids, _ in emitted])
            return emissions

        if enqueue() < steps:
            enqueue()
        return collect

    def _load(self, chunks: Sequence[Chunk], steps: int) -> tuple[DecodeShape, int]:
        """The step's shape, and the number of steps, up to `steps`, that are worth running."""
        state, stops = self._state, max(len(c.job.params.stop_token_ids) for c in chunks if c.job.params)
        if stops > state.max_stops:
            self._state = DecodeState(state.rows, state.tables.shape[1], self.decode_steps, self.device, stops)
            self._forget_graphs()
        shared = None
        if self._exact is None and self.path != "per_row":
            kv_bytes = self._kv_shape.bytes_per_token / self._kv_shape.layers
            min_tokens = 0 if self.path == "shared_prefix" else MIN_SAVED_BYTES / kv_bytes
            shared = SharedPrefixes.of([chunk.job.session for chunk in chunks], self.page_size, min_tokens)
        shape = DecodeShape(bucket_for(len(chunks)), "per_row" if shared is None else "shared_prefix")
        return shape, self._state.load(chunks, shared, self.page_size, self.context, steps)

    def _decode(self, shape: DecodeShape) -> Tensor:
        """One decode step over the state's first rows; its logits [rows, V]."""
        logits = self._replay(shape, partial(self._decode_step, shape))
        assert logits is not None
        return logits

    def _decode_step(self, shape: DecodeShape) -> Tensor:
        state, rows = self._state, shape.rows
        ids, positions, lens, tables = state.ids[:rows], state.positions[:rows], state.lens[:rows], state.tables[:rows]
        if self._exact is not None:  # the last token of each row
            pages = tables.gather(1, (positions // self.page_size).long()[:, None])[:, 0]
            pages = torch.where(lens > 0, pages, -1)
            numbers = torch.arange(rows, dtype=torch.int32, device=self.device)
            logits = self._exact.decode_exact(ExactPlan(self.keys, self.values, tables, ids, positions, pages, numbers))
            state.choose(logits)
            return logits
        shared = state.shared(rows) if shape.path == "shared_prefix" else None
        plan = DecodePlan(self.keys, self.values, tables, lens, shared, self._side)
        state_rows = StateRows(state.slots[:rows], lens)
        if self.fast_decoder is not None:
            logits = self.fast_decoder.decode(ids, plan)
        elif self.hybrid_decoder is not None:
            plan.layout = self._kv_shape.layout
            logits = self.hybrid_decoder.decode_with_states(ids, plan, self.states, state_rows)
        else:
            runs = [Run(state.slots[:rows].long(), 1, lens > 0)]
            logits = self._module_logits(plan, ids, positions, runs, self._steps_of(state_rows))
            if self._routing is not None:
                steps = (positions - state.starts[:rows]).long()
                at = steps * self._routed.shape[1] + torch.arange(rows, device=self.device)
                assert self._pass_routing is not None
                self._routed.flatten(0, 1).index_copy_(0, at, self._pass_routing)
        state.choose(logits)
        return logits

    def _steps_of(self, rows: StateRows) -> RecurrentSteps:
        """The recurrent layers, by place, that our kernels compute."""
        return {
            place: partial(self.recurrent_steps[module], parts=self.states.parts(place), rows=rows)
            for place, module in enumerate(self._recurrent.modules)
            if module in self.recurrent_steps
        }

    def _replay(self, shape: DecodeShape | PrefillShape, forward: Callable[[], Tensor | None]) -> Tensor | None:
        """Run the graph of a shape. From the first step that cannot be captured on, for another reason than memory,
        kernels are launched one by one."""
        if shape not in self._graphs:
            graph = forward
            if self._captures:
                try:
                    graph = self._captured(forward)
                except RuntimeError as error:
                    if lacks_memory(error):
                        raise torch.OutOfMemoryError(str(error)) from error
                    self._captures = False
                    log.warning(
                        "decode steps of %s cannot be captured as CUDA graphs; their kernels are launched one by one, "
                        "which is slower: %s", type(base_model(self.model)).__name__, error,
                    )  # fmt: skip
            self._graphs[shape] = graph
        return self._graphs[shape]()

    def _captured(self, forward: Callable[[], Tensor | None]) -> Callable[[], Tensor | None]:
        state = self._state
        lens, left = state.lens.clone(), state.left.clone()
        # Warm-up and capture run the kernels for real. With all rows dead they write no KV and advance no row.
        state.lens.zero_()
        state.left.zero_()
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # Triton compiles and libraries allocate workspaces here, which a capture forbids
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with capture(graph, self._graph_pool):
                logits = forward()
        finally:
            state.lens.copy_(lens)
            state.left.copy_(left)
        self._graph_pool = self._graph_pool or graph.pool()

        def replay() -> Tensor | None:
            graph.replay()
            return logits

        return replay

    def _module_logits(
        self, plan: DecodePlan | PrefillPlan, ids: Tensor, positions: Tensor, runs: Sequence[Run],
        steps: RecurrentSteps = NO_STEPS,
    ) -> Tensor:  # fmt: skip
        """[rows, V] logits of the module with our attention, and of its recurrent layers over `runs`, or by `steps`."""
        plan.layout = self._kv_shape.layout
        compute = over_runs(self.states, runs, steps)
        recording = nullcontext(list[Tensor]()) if self._routing is None else self._routing.record()
        with self._switch.use(ENGINE_ATTENTION, training=False), self._recurrent.use(compute), recording as choices:
            output = self.model(
                input_ids=ids.long()[None],
                position_ids=positions.long()[None],
                use_cache=False,
                logits_to_keep=1 if isinstance(plan, PrefillPlan) else 0,  # 0: all; of a prefill only its KV matters
                plan=plan,
            )
        if choices:
            self._pass_routing = torch.stack(choices, 1)
        return output.logits[0]


def bucket_for(rows: int) -> int:
    """The smallest captured batch size that holds `rows` rows."""
    return next((bucket for bucket in BUCKETS if bucket >= rows), -(-rows // 256) * 256)
