"""One step on the CPU: chunks of many sessions through one forward, logits where a token is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.engine.attention import ENGINE_ATTENTION, AttentionSwitch
from palestra.engine.cpu.fast_decoder import LeanDecoder
from palestra.engine.cpu.kv_slots import KVShape, Lanes, Pages
from palestra.engine.cpu.memory import give_freed_memory_back, keep_freed_memory
from palestra.engine.cpu.norms import FastNorms
from palestra.engine.cpu.plan import Decode, Feed, Groups, LanePlan
from palestra.engine.sampler import SamplingRow, sample
from palestra.engine.session import Chunk, Emission, Session


class CpuRunner:
    """Owns the KV of one model on the CPU and runs its steps."""

    decode_steps = 1  # tokens a session may sample before the scheduler looks again

    def __init__(self, model: nn.Module, shape: KVShape, pages: int, page_size: int) -> None:
        keep_freed_memory()
        self.model: Any = model
        self.lanes = Lanes(shape, Pages(shape, pages, page_size))
        self.switch = AttentionSwitch(model)
        self.norms = FastNorms(model)
        self.lean = LeanDecoder.of(model)
        self._heads = torch.arange(shape.heads)
        self._groups: tuple[int, int, Groups | None] = (-1, -1, None)

    def enter(self, session: Session) -> None:
        self.lanes.enter(session)

    def leave(self, session: Session, keep: bool) -> None:
        self.lanes.leave(session, keep)

    def copy_page(self, source: int, target: int) -> None:
        self.lanes.copy_page(source, target)

    def weights_changed(self) -> None:
        if self.lean is not None:
            self.lean.weights_changed()

    def release_memory(self) -> None:
        self.lanes.release_memory()
        if self.lean is not None:
            self.lean.release_memory()
        give_freed_memory_back()

    def reserve_memory(self) -> None:
        self.lanes.reserve_memory()

    def give_up_lean(self) -> bool:
        lean, self.lean = self.lean, None
        return lean is not None

    def step(self, chunks: Sequence[Chunk]) -> list[Emission]:
        """Run the chunks; what each sampling one emitted."""
        ordered, decoding = self._arrange(chunks)
        with torch.inference_mode():
            logits = self.forward(ordered, decoding)
            for chunk in chunks:
                chunk.job.session.kv_len += chunk.count
            sampling = [chunk.job for chunk in ordered if chunk.samples]
            if not sampling:
                return []
            tokens, logprobs = sample(logits, [SamplingRow.of(job) for job in sampling])
        pairs = zip(sampling, tokens.tolist(), logprobs.tolist(), strict=True)
        return [Emission(job, [token], [logprob]) for job, token, logprob in pairs]

    def forward(self, chunks: Sequence[Chunk], decoding: int) -> Tensor:
        """Logits [sampling chunks, vocabulary]; the first `decoding` chunks are lanes 0, 1, … with one token each."""
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
        plan = self._plan(chunks, decoding, positions)
        if self.lean is not None:
            return self.lean(ids, positions, ends, plan)
        with self.switch.use(ENGINE_ATTENTION, training=False), self.norms.use():
            output = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                logits_to_keep=torch.tensor(ends, dtype=torch.long),
                plan=plan,
            )
        return output.logits[0]

    def _arrange(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], int]:
        """Bring the sessions with one token to lanes 0..n-1, so that attention reads them in place."""
        singles = {chunk.job.session: chunk for chunk in chunks if chunk.count == 1}
        n, last = len(singles), len(self.lanes.sessions) - 1
        for lane in range(n):
            if self.lanes.sessions[lane] not in singles:
                while self.lanes.sessions[last] not in singles:
                    last -= 1
                self.lanes.swap(lane, last)
        ordered = [singles[session] for session in self.lanes.sessions[:n]]
        return ordered + [chunk for chunk in chunks if chunk.count > 1], n

    def _plan(self, chunks: Sequence[Chunk], decoding: int, positions: list[int]) -> LanePlan:
        lanes = self.lanes
        own_lens = [chunk.job.session.kv_len - lanes.base[chunk.job.session.lane] + chunk.count for chunk in chunks]
        lanes.own.ensure(len(lanes.sessions), max(own_lens))
        rows = [chunk.job.session.lane for chunk in chunks for _ in range(chunk.count)]
        columns = [position - lanes.base[row] for row, position in zip(rows, positions, strict=True)]
        heads, length = len(self._heads), lanes.own.length
        row_starts = torch.tensor(rows) * (heads * length) + torch.tensor(columns)
        targets = (row_starts[:, None] + self._heads * length).view(-1)
        decode = None
        if decoding:
            lens = own_lens[:decoding]
            decode = Decode(lanes, lens, max(lens), self._grouping(decoding))
        feeds, first = [], decoding
        for chunk, own_len in zip(chunks[decoding:], own_lens[decoding:], strict=True):
            feeds.append(Feed(lanes, chunk.job.session.lane, first, chunk.count, own_len))
            first += chunk.count
        return LanePlan(lanes, targets, decode, feeds)

    def _grouping(self, n: int) -> Groups | None:
        generation, lanes_then, groups = self._groups
        if (generation, lanes_then) != (self.lanes.generation, n):
            groups = Groups.of(self.lanes, n)
            self._groups = (self.lanes.generation, n, groups)
        return groups
