"""KV on the CPU: pages for every session, contiguous slots for those that run.

Reading pages one by one costs as much as attention itself, so a session that enters the batch gets a slot: one
row of a padded buffer that attention reads in place. Siblings of one fork share a row of the prefix buffer, so a
prompt is read once for the whole group, not once for each. A session that leaves the batch keeps its slot, since most
are back as soon as a tool has answered. Its new tokens are written to its pages when another session shares them, or
needs the slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palestra.core.errors import ResourceError
from palestra.engine.runner import KVMemory
from palestra.engine.session import Session
from palestra.engine.supported import KVShape


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    size = int(np.prod(shape)) * dtype.itemsize
    try:
        return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(tuple(shape))
    except MemoryError:
        need = f"the KV cache needs {size / 2**30:.1f} GiB of address space"
        raise ResourceError(f"{need}; raise `ulimit -v`, or set a lower model.kv_memory_gib") from None


def empty_stores(shape: KVShape, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values as [layers, rows, heads, length, dim]."""
    lead = (shape.layers, rows, shape.heads, length)
    return lazy_zeros((*lead, shape.key_dim), shape.dtype), lazy_zeros((*lead, shape.value_dim), shape.dtype)


class Pages:
    """The page store: keys and values as [layers, pages, heads, page_size, dim]."""

    def __init__(self, shape: KVShape, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._shape, self._pages = shape, pages
        self.reserve()

    def reserve(self) -> None:
        self.keys, self.values = empty_stores(self._shape, self._pages, self.page_size)

    def release(self) -> None:
        self.keys = self.values = torch.empty(0)

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
        self.keys, self.values = empty_stores(self.shape, self.rows, self.length)

    def ensure(self, rows: int, length: int) -> None:
        if rows <= self.rows and length <= self.length:
            return
        old_rows, old_length, old = self.rows, self.length, (self.keys, self.values)
        self.rows = max(self.rows, 1 << (rows - 1).bit_length())
        self.length = max(self.length, 1 << (length - 1).bit_length())
        self.keys, self.values = empty_stores(self.shape, self.rows, self.length)
        for new, before in zip((self.keys, self.values), old, strict=True):
            new[:, :old_rows, :, :old_length] = before

    def copy(self, source: int, target: int, length: int) -> None:
        for store in (self.keys, self.values):
            store[:, target, :, :length] = store[:, source, :, :length]

    def move(self, sources: Mapping[int, tuple[int, int]]) -> None:
        """Copy (row, length) into each target, every row before it is written over."""
        todo, lengths = dict(sources), dict(sources.values())
        for first in sorted(sources, key=lengths.__contains__):
            target, aside = first, None
            if first in todo and first in lengths:  # only circles are left: the first row has to be put aside
                aside = [store[:, first, :, : lengths[first]].clone() for store in (self.keys, self.values)]
            while target in todo:
                source, length = todo.pop(target)
                if source == first and aside is not None:
                    for store, row in zip((self.keys, self.values), aside, strict=True):
                        store[:, target, :, :length] = row
                else:
                    self.copy(source, target, length)
                target = source


@dataclass(eq=False, slots=True)
class Prefix:
    """What forks of one source begin with, in a row of the prefix buffer."""

    source: Session
    row: int
    length: int
    users: int = 0  # slots


@dataclass(eq=False, slots=True)
class Slot:
    """A session's own tokens, in a row of the own buffer."""

    session: Session
    prefix: Prefix | None
    base: int  # the position that its first column holds
    stored_len: int  # tokens up to here are in pages, too

    @property
    def length(self) -> int:
        return self.session.kv_len - self.base


class KVSlots(KVMemory):
    """Slots of the sessions that run, which `place` puts into rows 0, 1, … before a step, and of idle ones.

    Which rows idle sessions have depends on when others are closed, the order of the running ones does not: it decides
    the last bits of a matrix product.
    """

    def __init__(self, shape: KVShape, pages: Pages) -> None:
        self.pages = pages
        self.own = SlotBuffer(shape)
        self.prefix = SlotBuffer(shape)
        self.sessions: list[Session] = []  # that run, in the order of a step's rows
        self._idle: dict[Session, None] = {}  # that have a slot and do not run, in the order in which they left
        self._slots: list[Slot | None] = [None] * self.own.rows  # by row of `own`
        self._prefixes: list[Prefix] = []  # by row of `prefix`
        self.generation = 0  # changes with every change of rows

    def __getitem__(self, row: int) -> Slot:
        slot = self._slots[row]
        assert slot is not None
        return slot

    def release_memory(self) -> None:
        """No session has KV."""
        assert not any(self._slots)
        self.pages.release()
        self.own.reset()
        self.prefix.reset()
        self._slots = [None] * self.own.rows

    def enter(self, session: Session) -> None:
        if session in self._idle:
            del self._idle[session]
        else:
            row = self._free_row()
            prefix = self._join_prefix(session) if session.source is not None and session.shared_len else None
            slot = Slot(session, prefix, prefix.length if prefix is not None else 0, session.kv_len)
            if slot.length > 0:
                self.own.ensure(self.own.rows, slot.length)
                for own, store in ((self.own.keys, self.pages.keys), (self.own.values, self.pages.values)):
                    tokens = self.pages.read(store, session.table, slot.base, session.kv_len)
                    own[:, row, :, : slot.length] = tokens
            self._slots[row], session.slot = slot, row
            self.generation += 1
        self.own.ensure(self.own.rows, len(session.token_ids) - self[session.slot].base + 1)
        self.sessions.append(session)

    def leave(self, session: Session) -> None:
        """Keep the slot until another session needs it; free a source's slot, since its children use its pages."""
        self._stop_running(session)
        self._idle[session] = None
        if session.children or session.kv_len == 0:
            self._give_up_slot(session)

    def drop(self, session: Session) -> None:
        """Forget the KV that is in its slot, if it has one."""
        if session.slot >= 0:
            if session not in self._idle:
                self._stop_running(session)
            self._free_slot(session)

    def store(self, session: Session) -> None:
        """Write to its pages what only its slot holds."""
        if session.slot < 0:
            return
        slot = self[session.slot]
        start, stop = slot.stored_len - slot.base, slot.length
        if stop > start:
            for own, store in ((self.own.keys, self.pages.keys), (self.own.values, self.pages.values)):
                self.pages.write(store, session.table, slot.stored_len, own[:, session.slot, :, start:stop])
            slot.stored_len = session.kv_len

    def copy_page(self, source: int, target: int) -> None:
        for store in (self.pages.keys, self.pages.values):
            store[:, target] = store[:, source]

    def place(self, count: int) -> None:
        """Swap the first `count` running sessions into rows 0..count-1."""
        targets = {session: row for row, session in enumerate(self.sessions[:count]) if session.slot != row}
        if not targets:
            return
        taken = list(targets.values())
        left = {session.slot for session in targets}.difference(taken)
        for row in taken:
            slot = self._slots[row]
            if slot is not None and slot.session not in targets:
                # the row that it will have when it decodes, if that is known and left
                following = self.sessions.index(slot.session) if slot.session not in self._idle else -1
                targets[slot.session] = following if following in left else min(left)
                left.remove(targets[slot.session])
        self.own.move({row: (session.slot, self[session.slot].length) for session, row in targets.items()})
        moved = [(session, row, self[session.slot]) for session, row in targets.items()]
        for row in left:
            self._slots[row] = None
        for session, row, slot in moved:
            self._slots[row], session.slot = slot, row
        self.generation += 1

    def _free_row(self) -> int:
        """The one that its session will be placed in, if that is free. The buffer grows only for those that run."""
        following = len(self.sessions)
        if following < self.own.rows and self._slots[following] is None:
            return following
        if None in self._slots:
            return self._slots.index(None)
        if self._idle:
            longest_idle = next(iter(self._idle))
            row = longest_idle.slot
            self._give_up_slot(longest_idle)
            return row
        row = self.own.rows
        self.own.ensure(row + 1, self.own.length)
        self._slots += [None] * (self.own.rows - row)
        return row

    def _give_up_slot(self, session: Session) -> None:
        self.store(session)
        self._free_slot(session)

    def _free_slot(self, session: Session) -> None:
        prefix = self[session.slot].prefix
        self._slots[session.slot], session.slot = None, -1
        self._idle.pop(session, None)
        self.generation += 1
        if prefix is None:
            return
        prefix.users -= 1
        if prefix.users == 0:  # the last prefix moves into its row: attention reads unused rows in between, too
            last = self._prefixes.pop()
            if last is not prefix:
                self.prefix.copy(last.row, prefix.row, last.length)
                self._prefixes[prefix.row], last.row = last, prefix.row

    def _stop_running(self, session: Session) -> None:
        """The last one comes in its place."""
        last = self.sessions.pop()
        if last is not session:
            self.sessions[self.sessions.index(session)] = last

    def _join_prefix(self, session: Session) -> Prefix | None:
        """None for a single fork: it has no sibling to share a prefix with, so one attention call is enough."""
        assert session.source is not None
        if session.source.forks == 1:
            return None
        prefix = next((each for each in self._prefixes if each.source is session.source), None)
        if prefix is None:
            prefix = Prefix(session.source, len(self._prefixes), session.shared_len)
            self.prefix.ensure(prefix.row + 1, prefix.length)
            for own, store in ((self.prefix.keys, self.pages.keys), (self.prefix.values, self.pages.values)):
                own[:, prefix.row, :, : prefix.length] = self.pages.read(store, session.table, 0, prefix.length)
            self._prefixes.append(prefix)
        prefix.users += 1
        return prefix
