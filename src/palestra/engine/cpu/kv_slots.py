"""KV on the CPU: pages for every session, contiguous lanes for those that run.

Reading pages one by one costs as much as attention itself, so a session that enters the batch gets
a lane: one row of a padded buffer that attention reads in place. Siblings of one fork share a prefix
slot, so a prompt is read once for the whole group, not once for each. When a session leaves, its new
tokens go back to its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.engine.session import Session


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token: layers, heads, key and value width, dtype."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(tuple(shape))


class Pages:
    """The page store: keys and values as [layers, pages, heads, page_size, dim]."""

    def __init__(self, shape: KVShape, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._shape, self._pages = shape, pages
        self.reserve()

    def reserve(self) -> None:
        s, pages = self._shape, self._pages
        self.keys = lazy_zeros((s.layers, pages, s.heads, self.page_size, s.key_dim), s.dtype)
        self.values = lazy_zeros((s.layers, pages, s.heads, self.page_size, s.value_dim), s.dtype)

    def release(self) -> None:
        self.keys = self.values = torch.empty(0)

    def copy(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]

    def _span(self, table: Sequence[int], start: int, stop: int) -> tuple[Tensor, int]:
        first = start // self.page_size
        pages = torch.tensor(table[first : -(-stop // self.page_size)])
        return pages, start - first * self.page_size

    def read(self, store: Tensor, table: Sequence[int], start: int, stop: int) -> Tensor:
        """Tokens start..stop of one session -> [layers, heads, tokens, dim]."""
        pages, offset = self._span(table, start, stop)
        rows = store.index_select(1, pages).transpose(1, 2).flatten(2, 3)
        return rows[:, :, offset : offset + stop - start]

    def write(self, store: Tensor, table: Sequence[int], start: int, tokens: Tensor) -> None:
        """Put [layers, heads, tokens, dim] at `start` of one session."""
        for page in range(start // self.page_size, -(-(start + tokens.shape[2]) // self.page_size)):
            low = max(start, page * self.page_size)
            high = min(start + tokens.shape[2], (page + 1) * self.page_size)
            inside = slice(low - page * self.page_size, high - page * self.page_size)
            store[:, table[page], :, inside] = tokens[:, :, low - start : high - start]


class Slab:
    """Rows of contiguous KV, [layers, rows, heads, length, dim], that grow by doubling."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.reset()

    def reset(self) -> None:
        """Back to the smallest size; what was in it is lost."""
        self.rows, self.length = 8, 64
        self.keys, self.values = self._buffers()

    def _buffers(self) -> tuple[Tensor, Tensor]:
        s = self.shape
        lead = (s.layers, self.rows, s.heads, self.length)
        return lazy_zeros((*lead, s.key_dim), s.dtype), lazy_zeros((*lead, s.value_dim), s.dtype)

    def ensure(self, rows: int, length: int) -> None:
        if rows <= self.rows and length <= self.length:
            return
        old_rows, old_length, old = self.rows, self.length, (self.keys, self.values)
        self.rows = max(self.rows, 1 << (rows - 1).bit_length())
        self.length = max(self.length, 1 << (length - 1).bit_length())
        self.keys, self.values = self._buffers()
        for new, kept in zip((self.keys, self.values), old, strict=True):
            new[:, :old_rows, :, :old_length] = kept

    def swap(self, a: int, b: int, length: int) -> None:
        for store in (self.keys, self.values):
            kept = store[:, a, :, :length].clone()
            store[:, a, :, :length] = store[:, b, :, :length]
            store[:, b, :, :length] = kept


class Lanes:
    """The running sessions: lane i is row i of `own`; `slot[i]` is its row in `prefix`, or -1."""

    def __init__(self, shape: KVShape, pages: Pages) -> None:
        self.pages = pages
        self.own = Slab(shape)
        self.prefix = Slab(shape)
        self.sessions: list[Session] = []
        self.slot: list[int] = []
        self.base: list[int] = []  # the position that a lane's first column holds
        self._entered_at: list[int] = []  # tokens up to here are in pages already
        self._prefix_of: dict[Session, int] = {}  # source -> slot
        self._users: list[int] = []  # by slot
        self.prefix_len: list[int] = []  # by slot
        self.generation = 0  # changes with every change of composition

    def copy_page(self, source: int, target: int) -> None:
        self.pages.copy(source, target)

    def release_memory(self) -> None:
        """Every session has left."""
        assert not self.sessions
        self.pages.release()
        self.own.reset()
        self.prefix.reset()

    def reserve_memory(self) -> None:
        self.pages.reserve()

    def enter(self, session: Session) -> None:
        lane = len(self.sessions)
        slot = self._join_prefix(session) if session.source is not None and session.shared_len else -1
        base = session.shared_len if slot >= 0 else 0
        self.own.ensure(lane + 1, len(session.token_ids) - base + 1)
        if session.kv_len > base:
            for row, store in ((self.own.keys, self.pages.keys), (self.own.values, self.pages.values)):
                row[:, lane, :, : session.kv_len - base] = self.pages.read(store, session.table, base, session.kv_len)
        self.sessions.append(session)
        self.slot.append(slot)
        self.base.append(base)
        self._entered_at.append(session.kv_len)
        session.lane = lane
        self.generation += 1

    def leave(self, session: Session, keep: bool) -> None:
        lane, last = session.lane, len(self.sessions) - 1
        start, base = self._entered_at[lane], self.base[lane]
        if keep and session.kv_len > start:
            for row, store in ((self.own.keys, self.pages.keys), (self.own.values, self.pages.values)):
                self.pages.write(store, session.table, start, row[:, lane, :, start - base : session.kv_len - base])
        if lane != last:
            self.swap(lane, last)
        for column in (self.sessions, self.base, self._entered_at):
            column.pop()
        self._leave_prefix(self.slot.pop())
        session.lane = -1
        self.generation += 1

    def swap(self, a: int, b: int) -> None:
        length = max(self.sessions[i].kv_len - self.base[i] for i in (a, b))
        self.own.swap(a, b, length)
        columns: tuple[list[Any], ...] = (self.sessions, self.slot, self.base, self._entered_at)
        for column in columns:
            column[a], column[b] = column[b], column[a]
        self.sessions[a].lane, self.sessions[b].lane = a, b
        self.generation += 1

    def _join_prefix(self, session: Session) -> int:
        source = session.source
        assert source is not None
        slot = self._prefix_of.get(source, -1)
        if slot < 0:
            slot = self._users.index(0) if 0 in self._users else len(self._users)
            if slot == len(self._users):
                self._users.append(0)
                self.prefix_len.append(0)
            self._fill_prefix(slot, session)
            self._prefix_of[source] = slot
        self._users[slot] += 1
        return slot

    def _fill_prefix(self, slot: int, session: Session) -> None:
        length = session.shared_len
        self.prefix.ensure(slot + 1, length)
        for row, store in ((self.prefix.keys, self.pages.keys), (self.prefix.values, self.pages.values)):
            row[:, slot, :, :length] = self.pages.read(store, session.table, 0, length)
        self.prefix_len[slot] = length

    def _leave_prefix(self, slot: int) -> None:
        if slot < 0:
            return
        self._users[slot] -= 1
        if self._users[slot] == 0:
            self._prefix_of = {source: s for source, s in self._prefix_of.items() if s != slot}
