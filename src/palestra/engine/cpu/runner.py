"""One step on the CPU: chunks of many sessions in one forward, with logits where a token is sampled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from palestra.core.machine import phases
from palestra.engine.attention import ENGINE_ATTENTION, AttentionSwitch
from palestra.engine.cpu.fast_decoder import CpuFastDecoder
from palestra.engine.cpu.kv_slots import KVSlots, Pages, lazy_zeros
from palestra.engine.cpu.plan import PrefillChunk, SharedPrefixes, SlotPlan, SlotRows, batches
from palestra.engine.recurrent import RecurrentLayers, StateStore, over_runs, runs_of
from palestra.engine.routing import ExpertRouting
from palestra.engine.runner import Runner
from palestra.engine.sampler import SamplingRow, sample
from palestra.engine.session import Chunk, Collect, Emission, Session
from palestra.engine.supported import KVShape

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_RETAINED_BYTES, _MAX_POOLED_BYTES = 1 << 30, 1 << 25  # glibc takes at most 32 MiB for the second


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed activations instead of giving them back and faulting them in again.

    Holds for the whole process, the learner's activations too. False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAX_POOLED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES))


def give_freed_memory_back() -> bool:
    """Return what is free at the moment to the operating system; False where there is no glibc."""
    try:
        return bool(ctypes.CDLL("libc.so.6").malloc_trim(0))
    except (OSError, AttributeError):
        return False


class CpuRunner(Runner):
    """Owns the KV of one model on the CPU and runs its steps."""

    paths = ("slots",)

    def __init__(
        self,
        model: nn.Module,
        shape: KVShape,
        pages: int,
        page_size: int,
        state_slots: int = 0,
        routing: ExpertRouting | None = None,
    ) -> None:
        keep_freed_memory()
        self._routing = routing
        self.model: Any = model
        self.slots = self.memory = KVSlots(shape, Pages(shape, pages, page_size))
        self._layout = shape.layout
        self._recurrent = RecurrentLayers(model)
        self.states = StateStore(shape.states, state_slots, lazy_zeros)
        self._state_slots = state_slots
        self.fast_decoder = CpuFastDecoder.of(model)
        self._switch = AttentionSwitch(model)
        self._heads = torch.arange(shape.heads)
        self._prefixes: tuple[int, int, SharedPrefixes | None] = (-1, -1, None)

    def weights_changed(self) -> None:
        if self.fast_decoder is not None:
            self.fast_decoder.weights_changed()

    def release_memory(self) -> None:
        self.slots.release_memory()
        self.states.release()
        if self.fast_decoder is not None:
            self.fast_decoder.release_memory()
        give_freed_memory_back()

    def reserve_memory(self, pages: int) -> None:
        """Pages are taken as they fill, so fewer need nothing else."""
        self.slots.pages.reserve()
        self.states.reserve(self._state_slots)

    def disable_fast_path(self) -> bool:
        fast_decoder, self.fast_decoder = self.fast_decoder, None
        return fast_decoder is not None

    def launch(self, chunks: Sequence[Chunk]) -> Collect:
        emissions = self._step_with_states(chunks) if self._recurrent.modules else self.step(chunks)
        return lambda until_one_ends: emissions

    def _step_with_states(self, chunks: Sequence[Chunk]) -> list[Emission]:
        """All tokens but those that are sampled from, then the snapshots, then these."""
        fills = [Chunk(c.job, c.count - c.samples, samples=False) for c in chunks if c.count > c.samples]
        if fills:
            self.step(fills)
        for chunk in chunks:
            if chunk.snapshot is not None:
                self.states.copy(chunk.job.session.state, chunk.snapshot)
        sampling = [Chunk(c.job, 1, samples=True) for c in chunks if c.samples]
        return self.step(sampling) if sampling else []

    def step(self, chunks: Sequence[Chunk]) -> list[Emission]:
        """Run the chunks; what each sampling one emitted."""
        ordered, decoding = self._arrange(chunks)
        with phases("decode" if decoding == len(ordered) else "prefill"), torch.inference_mode():
            logits = self.forward(ordered, decoding) if self._routing is None else self._recorded(ordered, decoding)
            for chunk in chunks:
                chunk.job.session.kv_len += chunk.count
            sampling = [chunk.job for chunk in ordered if chunk.samples]
            if not sampling:
                return []
            tokens, logprobs = sample(logits, list(map(SamplingRow.of, sampling)))
        pairs = zip(sampling, tokens.tolist(), logprobs.tolist(), strict=True)
        return [Emission(job, [token], [logprob]) for job, token, logprob in pairs]

    def _recorded(self, chunks: Sequence[Chunk], decoding: int) -> Tensor:
        """The same as `forward`; the sessions get the experts of their tokens."""
        assert self._routing is not None
        with self._routing.record() as choices:
            logits = self.forward(chunks, decoding)
        rows = torch.stack(choices, 1).split([chunk.count for chunk in chunks])  # [count, layers, k] each
        for chunk, own in zip(chunks, rows, strict=True):
            session = chunk.job.session
            if session.routing is not None:
                session.routing.add(session.kv_len, own)
        return logits

    def forward(self, chunks: Sequence[Chunk], decoding: int) -> Tensor:
        """Logits [sampling chunks, vocabulary]; the first `decoding` chunks are slots 0, 1, … with one token each."""
        ids: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        for chunk in chunks:
            session = chunk.job.session
            stop = session.kv_len + chunk.count
            ids += session.token_ids[session.kv_len : stop]
            positions += range(session.kv_len, stop)
            if chunk.samples:
                ends.append(len(ids) - 1)
        plan = self._plan(chunks, decoding)
        if self.fast_decoder is not None:
            return self.fast_decoder(ids, positions, ends, plan)
        rows = [(chunk.job.session.state, chunk.count) for chunk in chunks] if self._recurrent.modules else []
        compute = over_runs(self.states, runs_of(rows, torch.device("cpu")))
        with self._switch.use(ENGINE_ATTENTION, training=False), self._recurrent.use(compute):
            output = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                logits_to_keep=torch.tensor(ends, dtype=torch.long),
                plan=plan,
            )
        return output.logits[0]

    def _arrange(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], int]:
        """Sessions with one token first, in slots 0..n-1, where attention reads them; then the rest by length."""
        singles: dict[Session, Chunk] = {}
        others: list[Chunk] = []
        for chunk in chunks:
            if chunk.count == 1:
                singles[chunk.job.session] = chunk
            else:
                others.append(chunk)
        sessions = self.slots.sessions
        n, last = len(singles), len(sessions) - 1
        for slot in range(n):
            if sessions[slot] not in singles:
                while sessions[last] not in singles:
                    last -= 1
                sessions[slot], sessions[last] = sessions[last], sessions[slot]
        self.slots.place(n)
        others.sort(key=attrgetter("count"))
        return [*map(singles.__getitem__, sessions[:n]), *others], n

    def _plan(self, chunks: Sequence[Chunk], decoding: int) -> SlotPlan:
        slots = self.slots
        rows: list[int] = []
        counts: list[int] = []
        own_lens: list[int] = []
        token_rows: list[int] = []
        columns: list[int] = []
        for chunk in chunks:
            row, count = chunk.job.session.slot, chunk.count
            length = slots[row].length
            rows.append(row)
            counts.append(count)
            own_lens.append(length + count)
            token_rows += [row] * count
            columns += range(length, length + count)
        slots.own.ensure(slots.own.rows, max(own_lens))
        heads, length = len(self._heads), slots.own.length
        row_starts = torch.tensor(token_rows) * (heads * length) + torch.tensor(columns)
        targets = (row_starts[:, None] + self._heads * length).view(-1)
        parts: list[SlotRows | PrefillChunk] = []
        first = 0
        for part in batches(counts, own_lens):
            if counts[part.start] > 1 and part.stop - part.start == 1:
                at = part.start
                parts.append(PrefillChunk(slots, rows[at], first, counts[at], own_lens[at]))
            elif counts[part.start] > 1:
                prefixes = SharedPrefixes.of(slots, rows[part])
                parts.append(SlotRows(slots, rows[part], counts[part], own_lens[part], first, prefixes))
            else:
                if self._prefixes[:2] != (slots.generation, decoding):  # the batch has changed
                    self._prefixes = slots.generation, decoding, SharedPrefixes.of(slots, range(decoding))
                parts.append(SlotRows(slots, rows[part], counts[part], own_lens[part], first, self._prefixes[2]))
            first += sum(counts[part])
        plan = SlotPlan(slots, targets, parts)
        plan.layout = self._layout
        return plan
