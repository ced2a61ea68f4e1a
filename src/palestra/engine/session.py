"""Sessions (token sequences with cached KV), their turns (jobs), and the pages that hold the KV: with reference counts,
an index of common beginnings, and the rows of a step that share pages."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from palestra.core.types import Array, Finish, Matching, SamplingParams, Turn
from palestra.engine.routing import RoutingRecord

BLOCK_ROWS = 8  # rows that read a prefix together
MIN_SAVED_BYTES = 96 << 20  # of a layer's KV: to read them, mostly from the L2 cache, takes longer than a kernel more


@dataclass(eq=False, slots=True)
class Session:
    """Tokens, and how many of them have their KV in pages.

    A forked session has a `source`: the sequence that it and its siblings go on from. The source is
    computed once; each child inherits its pages. `shared_len` is how many leading tokens were inherited. A branch
    shares pages, too, when it is made, and is independent from then on.
    """

    token_ids: list[int]
    source: Session | None = None
    table: list[int] = field(default_factory=list)
    kv_len: int = 0
    shared_len: int = 0
    forks: int = 0  # that were made of it
    children: int = 0  # of those, who may still need this source
    closed: bool = False
    job: Job | None = None
    running: bool = False  # in the scheduler's batch
    slot: int = -1  # of contiguous KV on the CPU
    state: int = -1  # slot of the recurrent state after `kv_len` tokens, if the model has one
    snapshots: dict[int, int] = field(default_factory=dict)  # length -> slot of the state after so many tokens
    wanted: set[int] = field(default_factory=set)  # lengths at which a snapshot is to be taken
    routing: RoutingRecord | None = None  # the experts of its tokens, if the engine records them
    number: int = field(default_factory=itertools.count().__next__)  # in the order in which they were opened

    @property
    def fill_target(self) -> int:
        """KV that children inherit: all but the last token, which each child computes to sample from."""
        return len(self.token_ids) - 1


@dataclass(eq=False, slots=True)
class Job:
    """One turn in progress. `params=None` only computes KV (a shared prompt)."""

    session: Session
    params: SamplingParams | None
    start: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    finish: Finish | None = None
    matching: Matching | None = None
    routing: Array | None = None  # of the tokens that were computed for it, once it has ended
    only_temperature: bool = field(init=False)  # of its params; every step asks for it

    def __post_init__(self) -> None:
        self.only_temperature = self.params is None or self.params.only_temperature

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled (or before the fill is done)."""
        end = len(self.session.token_ids) if self.params is not None else self.session.fill_target
        return end - self.session.kv_len

    def result(self) -> Turn:
        if self.finish is None:
            raise RuntimeError("the turn is still being sampled")
        ids = self.session.token_ids[self.start : self.start + len(self.logprobs)]
        return Turn("model", ids, self.logprobs, self.versions, self.finish, self.routing)  # type: ignore[arg-type]


@dataclass(eq=False, slots=True)
class Chunk:
    """What one session does in one step: compute `count` tokens from its `kv_len` on, then perhaps sample.

    `snapshot` is a slot for the recurrent state behind all of these tokens but the one that is sampled from.
    """

    job: Job
    count: int
    samples: bool
    snapshot: int | None = None


class Emission(NamedTuple):
    """Tokens that a job sampled in one step, oldest first."""

    job: Job
    token_ids: list[int]
    logprobs: list[float]


# Waits for a launched step and returns what each sampling chunk emitted. If the argument is true, a runner that decodes
# several steps continues until a turn ends.
Collect = Callable[[bool], list[Emission]]


def no_emissions(until_one_ends: bool) -> list[Emission]:
    """The result of a step in which no session samples."""
    return []


@dataclass(frozen=True, slots=True)
class Fork:
    """A table that shares every full page with its parent; `copy` is the partial page as (from, to)."""

    table: list[int]
    copy: tuple[int, int] | None


class PagePool:
    """Counts the holders of each page. A page without holders is free.

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

    def holders(self, page: int) -> int:
        return self._holders[page]

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


class PrefixIndex:
    """Finds the session that begins with most of another one's pages, so that common prompts are computed once.

    Agents of a step have the same instructions, tools and examples before different questions. Only full pages are
    shared, so that nothing has to be copied.

    >>> index = PrefixIndex(page_size=2)
    >>> first = Session([1, 2, 3, 4, 5])
    >>> index.add(first)
    >>> list(index.find(Session([1, 2, 3, 4, 6, 7]))) == [(first, 4), (first, 2)]
    True
    >>> index.remove(first); list(index.find(Session([1, 2, 3])))
    []
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._sessions: dict[int, Session] = {}  # by the hash of the tokens up to the end of a page
        self._hashes: dict[Session, list[int]] = {}

    def add(self, session: Session) -> None:
        """Its prompt is computed, or will be in the next steps. Where two begin alike, the first one stays."""
        if session in self._hashes:
            return
        self._hashes[session] = list(self._page_hashes(session))
        for value in self._hashes[session]:
            self._sessions.setdefault(value, session)

    def remove(self, session: Session) -> None:
        for value in self._hashes.pop(session, ()):
            if self._sessions.get(value) is session:
                del self._sessions[value]

    def find(self, session: Session) -> Iterator[tuple[Session, int]]:
        """Sessions that begin with the same tokens, and how many of these fill pages; the longest first."""
        compared = None  # equal in more tokens, so equal in fewer
        for pages, value in reversed(list(enumerate(self._page_hashes(session), 1))):
            found, length = self._sessions.get(value), pages * self.page_size
            if found is None:
                continue
            if found is compared or found.token_ids[:length] == session.token_ids[:length]:
                compared = found
                yield found, length

    def holds(self, session: Session) -> bool:
        """Whether another one begins with all its pages."""
        pages = session.fill_target // self.page_size
        return next((length for _, length in self.find(session)), 0) == pages * self.page_size

    def _page_hashes(self, session: Session) -> Iterator[int]:
        """Of the pages that are full before the last token, which is computed in any case to sample from it."""
        value = 0
        for end in range(self.page_size, session.fill_target + 1, self.page_size):
            value = hash((value, *session.token_ids[end - self.page_size : end]))
            yield value


class SharedPrefixes(NamedTuple):
    """Leading tokens that rows share, as int32: arrays on the host, or device tensors."""

    tokens: Any  # [rows], whole pages; 0: it reads all its pages by itself
    blocks: Any  # [blocks, BLOCK_ROWS] rows with the same prefix, padded with -1

    @classmethod
    def of(cls, sessions: Sequence[Session], page_size: int, min_tokens: float) -> SharedPrefixes | None:
        """The arrays; None where fewer than `min_tokens` would be read less.

        A page is shared together with all pages before it. So rows with the same last shared page share them all.
        """
        lengths = [session.shared_len // page_size for session in sessions]
        if sum(lengths) * page_size < min_tokens:
            return None
        rows_of = defaultdict[int, list[int]](list)
        for row, (session, pages) in enumerate(zip(sessions, lengths, strict=True)):
            if pages:
                rows_of[session.table[pages - 1]].append(row)
        parts = (rows[i : i + BLOCK_ROWS] for rows in rows_of.values() for i in range(0, len(rows), BLOCK_ROWS))
        blocks = [part for part in parts if len(part) > 1]
        saved = sum((len(block) - 1) * lengths[block[0]] for block in blocks) * page_size
        if not blocks or saved < min_tokens:
            return None
        tokens = np.zeros(len(sessions), np.int32)
        padded = np.full((len(blocks), BLOCK_ROWS), -1, np.int32)
        for place, block in enumerate(blocks):
            padded[place, : len(block)] = block
            tokens[block] = lengths[block[0]] * page_size
        return cls(tokens, padded)
