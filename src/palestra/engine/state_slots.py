"""Which sessions hold which slots of recurrent state: one that changes with every token, and snapshots that do not.

The KV of a token stays where it is, so a session can be continued from any of its tokens. A recurrent state is
overwritten by the next token. Snapshots are copies at lengths where another session may begin: the start of a turn,
and the end of a prefix that two prompts have in common. From any other length a session is computed again from the
nearest snapshot before it. Snapshots are evicted, oldest first, when slots run out.
"""

from __future__ import annotations

from palestra.engine.recurrent import StateStore
from palestra.engine.session import PagePool, Session


class StateSlots:
    """Hands out slots; knows no tensors. Slot 0 belongs to no session."""

    def __init__(self, store: StateStore, slots: int) -> None:
        self._store = store
        self._pool = PagePool(slots + 1, 1)
        self._pool.take(1)  # slot 0
        self._snapshots: dict[tuple[Session, int], None] = {}  # in the order in which they were taken

    @property
    def free(self) -> int:
        return self._pool.free

    def longest(self, session: Session, length: int) -> int:
        """The most tokens, up to `length`, whose state the session holds; 0 if it must be computed from the start."""
        lengths = [n for n in session.snapshots if n <= length]
        if session.state >= 0 and not session.running and session.kv_len <= length:
            lengths.append(session.kv_len)
        return max(lengths, default=0)

    def enter(self, session: Session) -> bool:
        """Give a session that will run the state of its `kv_len` tokens; False if no slot is free."""
        if session.state >= 0:
            return True
        slot = self._take(keep=(session, session.kv_len))
        if slot is None:
            return False
        if session.kv_len == 0:
            self._store.clear(slot)
        else:
            self._store.copy(session.snapshots[session.kv_len], slot)
        session.state = slot
        return True

    def leave(self, session: Session) -> None:
        """A source's state is what its children begin with; no tokens have no state."""
        if session.state < 0:
            return
        if session.kv_len == 0:
            self.invalidate(session)
        elif session.children:
            slot, session.state = session.state, -1
            if session.kv_len in session.snapshots:
                self._pool.release([slot])
            else:
                self._add(session, session.kv_len, slot)

    def invalidate(self, session: Session) -> None:
        """Its state is past its tokens: give it up; snapshots stay."""
        if session.state >= 0:
            self._pool.release([session.state])
            session.state = -1

    def share(self, source: Session, session: Session, length: int) -> bool:
        """Give `session` a snapshot of the source's first `length` tokens; False if no slot is free."""
        if length not in source.snapshots:
            slot = self._take(keep=None)
            if slot is None:
                return False
            self._store.copy(source.state, slot)
            self._add(source, length, slot)
        slot = source.snapshots[length]
        self._pool.share([slot])
        self._add(session, length, slot)
        return True

    def snapshot(self, session: Session, length: int) -> int | None:
        """A slot for the state at `length`, into which the runner copies it; None if there is one, or none is free."""
        if length in session.snapshots or length == 0:
            return None
        slot = self._take(keep=None)
        if slot is not None:
            self._add(session, length, slot)
        return slot

    def drop(self, session: Session) -> None:
        self.invalidate(session)
        session.wanted.clear()
        for length in list(session.snapshots):
            self._remove(session, length)

    def _add(self, session: Session, length: int, slot: int) -> None:
        session.snapshots[length] = slot
        self._snapshots[session, length] = None

    def _remove(self, session: Session, length: int) -> None:
        self._pool.release([session.snapshots.pop(length)])
        del self._snapshots[session, length]

    def _take(self, keep: tuple[Session, int] | None) -> int | None:
        """A free slot, after evicting the oldest snapshots if necessary; `keep` and those of sources stay."""
        for shared in (False, True):  # evicting one that others hold as well frees no slot by itself
            for session, length in list(self._snapshots):
                if self._pool.free:
                    return self._pool.take(1)[0]
                is_shared = self._pool.holders(session.snapshots[length]) > 1
                if (session, length) != keep and not session.children and is_shared == shared:
                    self._remove(session, length)
        return self._pool.take(1)[0] if self._pool.free else None
