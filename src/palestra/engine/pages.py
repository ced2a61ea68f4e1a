"""Pages of KV memory with reference counts: take, share, release, fork. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """A table that shares every full page with its parent; `copy` is the partial page as (from, to)."""

    table: list[int]
    copy: tuple[int, int] | None


class PagePool:
    """Counts who holds which page. A page is free when nobody does.

    >>> pool = PagePool(pages=4, page_size=16)
    >>> table = pool.take(2)                       # 20 tokens: one full page, one with 4
    >>> child = pool.fork(table, length=20)
    >>> child.table[0] == table[0], child.copy == (table[1], child.table[1]), pool.free
    (True, True, 1)
    >>> pool.release(table); pool.release(child.table); pool.free
    4
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, length: int) -> int:
        """Pages that `length` tokens fill."""
        return -(-length // self.page_size)

    def take(self, n: int) -> list[int]:
        """n fresh pages; MemoryError if fewer are free."""
        if n > len(self._free):
            raise MemoryError(f"{n} pages asked for, {len(self._free)} of {self.pages} free")
        taken = [self._free.pop() for _ in range(n)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self._holders[page] <= 0:
                raise RuntimeError(f"page {page} was released more often than taken")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def fork(self, table: Sequence[int], length: int) -> Fork:
        """A second table over the first `length` tokens of `table`."""
        full, rest = divmod(length, self.page_size)
        own = self.take(1) if rest else []
        shared = list(table[:full])
        self.share(shared)
        return Fork(shared + own, (table[full], own[0]) if rest else None)
