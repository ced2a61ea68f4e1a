"""KV on the CPU: pages for every session, contiguous slots for those that run.

Reading pages one by one costs as much as attention itself, so a session that enters the batch gets a slot: one
row of a padded buffer that attention reads in place. Siblings of one fork share a row of the prefix buffer, so a
prompt is read once for the whole group, not once for each. When a session leaves, its new tokens go back to its
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.engine.kv_shape import KVShape
from palestra.engine.session import Session


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
        s = self._shape
        lead = (s.layers, self._pages, s.heads, self.page_size)
        self.keys, self.values = lazy_zeros((*lead, s.key_dim), s.dtype), lazy_zeros((*lead, s.value_dim), s.dtype)

    def release(self) -> None:
        self.keys = self.values = torch.empty(0)

    def copy(self, source: int, target: int) -> None:
        for store in (self.keys, self.values):
            store[:, target] = store[:, source]

    def read(self, store: Tensor, table: Sequence[int], start: int, stop: int) -> Tensor:
        """Tokens start..stop of one session -> [layers, heads, tokens, dim]."""
        first = start // self.page_size
        pages = torch.tensor(table[first : -(-stop // self.page_size)])
        rows = store.index_select(1, pages).transpose(1, 2).flatten(2, 3)
        offset = start - first * self.page_size
        return rows[:, :, offset : offset + stop - start]

    def write(self, store: Tensor, table: Sequence[int], start: int, tokens: Tensor) -> None:
        """Put [layers, heads, tokens, dim] at `start` of one session."""
        for page in range(start // self.page_size, -(-(start + tokens.shape[2]) // self.page_size)):
            low = max(start, page * self.page_size)
            high = min(start + tokens.shape[2], (page + 1) * self.page_size)
            inside = slice(low - page * self.page_size, high - page * self.page_size)
            store[:, table[page], :, inside] = tokens[:, :, low - start : high - start]


class SlotBuffer:
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
        for new, before in zip((self.keys, self.values), old, strict=True):
            new[:, :old_rows, :, :old_length] = before

    def swap(self, a: int, b: int, length: int) -> None:
        for store in (self.keys, self.values):
            before = store[:, a, :, :length].clone()
            store[:, a, :, :length] = store[:, b, :, :length]
            store[:, b, :, :length] = before


class KVSlots:
    """The running sessions: slot i is row i of `own`; `prefix_row[i]` is its row in `prefix`, or -1."""

    def __init__(self, shape: KVShape, pages: Pages) -> None:
        self.pages = pages
        self.own = SlotBuffer(shape)
        self.prefix = SlotBuffer(shape)
        self.sessions: list[Session] = []
        self.prefix_row: list[int] = []
        self.base: list[int] = []  # the position that a slot's first column holds
        self._entered_at: list[int] = []  # tokens up to here are in pages already
        self._row_of: dict[Session, int] = {}  # source -> its row in `prefix`
        self._users: list[int] = []  # by row of `prefix`
        self.prefix_len: list[int] = []  # by row of `prefix`
        self.generation = 0  # changes with every change of composition

    def copy_page(self, source: int, target: int) -> None:
        self.pages.copy(source, target)

    def stored_len(self, session: Session) -> int:
        """What a running session has computed goes to its pages when it leaves."""
        return session.kv_len if session.slot < 0 else self._entered_at[session.slot]

    def release_memory(self) -> None:
        """Every session has left."""
        assert not self.sessions
        self.pages.release()
        self.own.reset()
        self.prefix.reset()

    def reserve_memory(self) -> None:
        self.pages.reserve()

    def enter(self, session: Session) -> None:
        slot = len(self.sessions)
        row = self._join_prefix(session) if session.source is not None and session.shared_len else -1
        base = session.shared_len if row >= 0 else 0
        self.own.ensure(slot + 1, len(session.token_ids) - base + 1)
        if session.kv_len > base:
            for own, store in ((self.own.keys, self.pages.keys), (self.own.values, self.pages.values)):
                own[:, slot, :, : session.kv_len - base] = self.pages.read(store, session.table, base, session.kv_len)
        self.sessions.append(session)
        self.prefix_row.append(row)
        self.base.append(base)
        self._entered_at.append(session.kv_len)
        session.slot = slot
        self.generation += 1

    def leave(self, session: Session, keep: bool) -> None:
        slot, last = session.slot, len(self.sessions) - 1
        start, base = self._entered_at[slot], self.base[slot]
        if keep and session.kv_len > start:
            for own, store in ((self.own.keys, self.pages.keys), (self.own.values, self.pages.values)):
                self.pages.write(store, session.table, start, own[:, slot, :, start - base : session.kv_len - base])
        if slot != last:
            self.swap(slot, last)
        for column in (self.sessions, self.base, self._entered_at):
            column.pop()
        self._leave_prefix(self.prefix_row.pop())
        session.slot = -1
        self.generation += 1

    def swap(self, a: int, b: int) -> None:
        length = max(self.sessions[i].kv_len - self.base[i] for i in (a, b))
        self.own.swap(a, b, length)
        columns: tuple[list[Any], ...] = (self.sessions, self.prefix_row, self.base, self._entered_at)
        for column in columns:
            column[a], column[b] = column[b], column[a]
        self.sessions[a].slot, self.sessions[b].slot = a, b
        self.generation += 1

    def _join_prefix(self, session: Session) -> int:
        source = session.source
        assert source is not None
        row = self._row_of.get(source, -1)
        if row < 0:
            row = self._users.index(0) if 0 in self._users else len(self._users)
            if row == len(self._users):
                self._users.append(0)
                self.prefix_len.append(0)
            self._fill_prefix(row, session)
            self._row_of[source] = row
        self._users[row] += 1
        return row

    def _fill_prefix(self, row: int, session: Session) -> None:
        length = session.shared_len
        self.prefix.ensure(row + 1, length)
        for prefix, store in ((self.prefix.keys, self.pages.keys), (self.prefix.values, self.pages.values)):
            prefix[:, row, :, :length] = self.pages.read(store, session.table, 0, length)
        self.prefix_len[row] = length

    def _leave_prefix(self, row: int) -> None:
        if row < 0:
            return
        self._users[row] -= 1
        if self._users[row] == 0:
            self._row_of = {source: r for source, r in self._row_of.items() if r != row}
