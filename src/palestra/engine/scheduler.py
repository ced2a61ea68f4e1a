"""Continuous batching over a page pool: which sessions run in the next step. Knows tokens and pages, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from palestra.engine.runner import KVMemory
from palestra.engine.session import Chunk, Job, PagePool, PrefixIndex, Session
from palestra.engine.state_slots import StateSlots

MAX_KEPT = 256  # closed sessions whose KV stays
MIN_AWAITED_PREFIX = 64  # tokens; to compute fewer takes less time than the step that one would wait


class Scheduler:
    """Admits waiting jobs, cuts long prompts into chunks, and drops idle KV when pages run out.

    `states` are the slots of models with recurrent layers: a session goes on only from a length whose state is held.
    """

    def __init__(
        self,
        pool: PagePool,
        memory: KVMemory,
        max_running: int,
        tokens_per_step: int,
        context: int,
        states: StateSlots | None = None,
    ) -> None:
        self.pool = pool
        self.context = context
        self.memory = memory
        self.states = states
        self.max_running = max_running
        self.tokens_per_step = tokens_per_step
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}  # in the order in which they were admitted
        self.holders: dict[Session, None] = {}  # sessions with pages, in the order of their last use
        self.dropped_sessions = 0
        self.kept: dict[Session, None] = {}  # of those, what closed sessions left
        self._prefixes = PrefixIndex(pool.page_size)
        self._preempted: set[Job] = set()  # by the plan being made

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def submit(self, job: Job) -> None:
        job.session.job = job
        if self.states is not None:
            job.session.wanted.add(job.session.fill_target)  # where this turn may be sampled again from
        self.waiting.append(job)

    def withdraw(self, job: Job) -> None:
        """Remove a job, finished or not; its session keeps its KV and can be continued later."""
        session = job.session
        if job in self.running:  # pages that were reserved and not used are released
            del self.running[job]
            self.memory.leave(session)
            session.running = False
            if self.states is not None:
                self.states.leave(session)
            used = self.pool.needed(session.kv_len)
            self.pool.release(session.table[used:])
            del session.table[used:]
            self._touch(session)
        elif job in self.waiting:
            self.waiting.remove(job)
        session.job = None

    def drop(self, session: Session) -> None:
        """Discard a session's KV; its tokens stay, so that it can be computed again."""
        self.memory.drop(session)
        session.running = False
        self.pool.release(session.table)
        session.table = []
        session.kv_len = session.shared_len = 0
        if self.states is not None:
            self.states.drop(session)
        self.holders.pop(session, None)
        self.kept.pop(session, None)
        self._prefixes.remove(session)

    def keep_closed(self, session: Session) -> None:
        """Cache the full pages of a closed session for conversations that begin with them, until others need the room.

        Nothing is cached if another session holds the same pages. Beyond MAX_KEPT the least recently used go.
        """
        size = self.pool.page_size
        self.memory.store(session)
        length = session.kv_len - session.kv_len % size
        if self.states is not None:
            length = self.states.longest(session, session.kv_len)
        table = session.table[: self.pool.needed(length)]
        # one token more than the pages hold: the last token of a session is always computed, to sample from it
        kept = Session(session.token_ids[: length + 1], table=table, kv_len=length, routing=session.routing)
        self.pool.share(table)
        shared = True
        if self.states is not None:
            lengths = sorted({*(n for n in session.snapshots if n < length), length})
            shared = length > 0 and all([self.states.share(session, kept, n) for n in lengths])
        self.drop(session)
        if length < size or not shared or self._prefixes.holds(kept):
            self.drop(kept)
            return
        self._prefixes.add(kept)
        self._touch(kept)
        self.kept[kept] = None
        if len(self.kept) > MAX_KEPT:
            self.drop(next(each for each in self.holders if each in self.kept))

    def drop_all(self) -> None:
        """Discard all KV (the weights changed); jobs in progress are computed again, in the same order."""
        for session in [*(job.session for job in self.running), *self.holders]:
            self.drop(session)
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def branch(self, source: Session, session: Session) -> None:
        """Share the computed pages of `source` with a new session whose tokens `source` begins with."""
        # a fork that has not run yet has no KV of its own: its source holds the prompt's
        holder = source if source.source is None or source.kv_len > 0 else source.source
        length = min(holder.kv_len, session.fill_target)
        if self.states is not None:
            length = self.states.longest(holder, length)
        if not self._share(holder, session, length) and self.states is None:
            self._share(holder, session, length - length % self.pool.page_size)

    def plan(self, decode_reserve: int = 1) -> list[Chunk]:
        """The next step: first jobs that sample one token, then prompts and appends within the token budget.

        Takes every chunk's pages, and free pages for `decode_reserve` tokens after it. Decoding comes first so that
        long prompts never delay running turns; prompts are cut into chunks over several steps instead.
        """
        self._admit()
        self._preempted.clear()
        budget, page_size = self.tokens_per_step, self.pool.page_size
        chunks: list[Chunk] = []
        pending = [(job.pending, job) for job in self.running]
        pending.sort(key=lambda each: each[0] > 1)
        for tokens, job in pending:
            count, session = min(tokens, budget), job.session
            if count <= 0 or job in self._preempted:
                continue
            if self.states is not None:
                count = self._up_to_snapshot(job, count)
            if session.kv_len + count > len(session.table) * page_size and not self._take_room(job, count):
                continue
            chunk = Chunk(job, count, samples=job.params is not None and count == tokens)
            if self.states is not None and session.kv_len + count - chunk.samples in session.wanted:
                chunk.snapshot = self.states.snapshot(session, session.kv_len + count - chunk.samples)
            chunks.append(chunk)
            budget -= count
        if self._preempted:  # a later job may have taken the pages of one that was planned already
            chunks = [chunk for chunk in chunks if chunk.job not in self._preempted]
        if decode_reserve > 1:
            self._reserve(chunks, decode_reserve - 1)
        return chunks

    def _up_to_snapshot(self, job: Job, count: int) -> int:
        """Of the next `count` tokens those before the next length at which a snapshot is wanted."""
        session = job.session
        session.wanted = {length for length in session.wanted if length >= session.kv_len}
        ahead = [length - session.kv_len for length in session.wanted if length > session.kv_len]
        last = 1 if job.params is not None and count == job.pending else 0  # sampled from, behind the snapshot
        return min((n for n in ahead if n < count - last), default=count)

    def _reserve(self, chunks: Iterable[Chunk], tokens: int) -> None:
        """Take free pages for up to `tokens` more tokens after each chunk, within the context length.

        A runner that decodes several steps at once needs them before the scheduler plans again.
        """
        page_size = self.pool.page_size
        for chunk in chunks:
            session = chunk.job.session
            want = min(session.kv_len + chunk.count + tokens, self.context)
            if want > len(session.table) * page_size:
                self._take(session, min(self.pool.needed(want) - len(session.table), self.pool.free))

    def _admit(self) -> None:
        """Move waiting jobs into the batch, oldest session first.

        Not by arrival: the row order changes the last bits of matrix products, and tool latency must not decide it.
        """
        if len(self.waiting) > 1:
            self.waiting = deque(sorted(self.waiting, key=attrgetter("session.number")))
        blocked: list[Job] = []
        while self.waiting and len(self.running) < self.max_running:
            job = self.waiting.popleft()
            session, source = job.session, job.session.source
            if self.states is not None and session.state < 0:
                self._rewind(session)
            if source is not None and session.kv_len == 0 and source.fill_target > 0:  # inherit the source's KV
                computed = source.kv_len if self.states is None else self.states.longest(source, source.kv_len)
                if computed < source.fill_target:
                    blocked.append(job)
                    if source.job is None:
                        self.waiting.appendleft(Job(source, None, len(source.token_ids)))
                        source.job = self.waiting[0]
                    continue
                if not self._share(source, session, source.fill_target):
                    self.waiting.appendleft(job)
                    break
            elif source is None and session.kv_len == 0 and self._share_or_await_prefix(session):
                blocked.append(job)
                continue
            if job.pending <= 0:  # a fill whose KV is there already
                session.job = None
                continue
            # Room for the whole pending part; with nothing running, whatever there is must do.
            missing = self.pool.needed(session.kv_len + job.pending) - len(session.table)
            fits = self._free_up(missing, keep=(session,)) or not self.running
            if not fits or not self._enter_state(session):
                self.waiting.appendleft(job)
                break
            self.memory.enter(session)
            session.running = True
            self.running[job] = None
            if source is None:
                self._prefixes.add(session)
        self.waiting.extendleft(reversed(blocked))

    def _share_or_await_prefix(self, session: Session) -> bool:
        """Share the pages that other prompts have in common with it; True: wait, one of them is being computed."""
        for other, length in self._prefixes.find(session):
            if other.kv_len >= length:
                if self._share_prefix(other, session, length):
                    return False
                continue
            if self.states is not None:
                other.wanted.add(length)
            filling = other.running and other.job is not None and other.job.params is None
            if filling and length >= MIN_AWAITED_PREFIX:
                return True
        return False

    def _share_prefix(self, other: Session, session: Session, length: int) -> bool:
        """Share the computed pages of `length` equal tokens, or as many as there is a recurrent state for."""
        if self.states is not None:
            session.wanted.add(length)  # others may begin alike, too
            most = min(other.kv_len, session.fill_target)
            while length < most and other.token_ids[length] == session.token_ids[length]:
                length += 1
            length = self.states.longest(other, length)
        if length == 0 or not self._share(other, session, length):
            return self.states is None
        self._touch(other)
        return True

    def _share(self, source: Session, session: Session, length: int) -> bool:
        """Give a session without KV that of the source's first `length` tokens; False without a page for the last."""
        if length % self.pool.page_size and not self._free_up(1, keep=(session, source)):
            return False
        if self.states is not None and (length == 0 or not self.states.share(source, session, length)):
            return False
        self.memory.store(source)
        fork = self.pool.fork(source.table, length)
        if fork.copy is not None:
            self.memory.copy_page(*fork.copy)
        session.table = fork.table
        session.kv_len = session.shared_len = length
        if session.routing is not None and source.routing is not None:
            session.routing.inherit(source.routing, length)
        self._touch(session)
        return True

    def _enter_state(self, entering: Session) -> bool:
        """Take a slot for the recurrent state, dropping idle sessions if necessary; False if all others run."""
        while self.states is not None and not self.states.enter(entering):
            idle = (s for s in self.holders if s is not entering and not s.running and (s.state >= 0 or s.snapshots))
            victim = next(idle, None)
            if victim is None:
                return False
            self.drop(victim)
            self.dropped_sessions += 1
        return True

    def _rewind(self, session: Session) -> None:
        """Go back to the longest length whose recurrent state is held; what comes after it is computed again."""
        assert self.states is not None
        length = self.states.longest(session, session.kv_len)
        if length == session.kv_len:
            return
        self.memory.store(session)
        self.memory.drop(session)
        used = self.pool.needed(length)
        self.pool.release(session.table[used:])
        del session.table[used:]
        if length % self.pool.page_size and self.pool.holders(session.table[-1]) > 1:  # it will be written to
            if not self._free_up(1, keep=(session,)):
                self.drop(session)
                return
            [own] = self.pool.take(1)
            self.memory.copy_page(session.table[-1], own)
            self.pool.release(session.table[-1:])
            session.table[-1] = own
        session.kv_len = length
        if length < session.shared_len:
            session.shared_len = 0
        self._touch(session)

    def _take_room(self, job: Job, count: int) -> bool:
        """Take the pages for `count` more tokens, preempting younger jobs if necessary."""
        session = job.session
        missing = self.pool.needed(session.kv_len + count) - len(session.table)
        while not self._free_up(missing, keep=(session,)):
            victim = next((j for j in reversed(self.running) if j is not job), None)
            if victim is None:
                return False
            del self.running[victim]
            self._preempted.add(victim)
            self.drop(victim.session)
            self.dropped_sessions += 1
            self.waiting.appendleft(victim)
        self._take(session, missing)
        return True

    def _take(self, session: Session, pages: int) -> None:
        if pages > 0:
            session.table += self.pool.take(pages)
            self._touch(session)

    def _free_up(self, pages: int, keep: Iterable[Session]) -> bool:
        """Drop idle sessions, longest unused first, until `pages` are free."""
        if pages <= self.pool.free:
            return True
        excepted = set(keep)
        idle = [s for s in self.holders if s not in excepted and not s.running]
        for session in sorted(idle, key=lambda s: s.job is not None):
            self.drop(session)
            self.dropped_sessions += 1
            if pages <= self.pool.free:
                return True
        return False

    def _touch(self, session: Session) -> None:
        self.holders.pop(session, None)
        if session.table:
            self.holders[session] = None
