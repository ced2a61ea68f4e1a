"""Which sessions hold the KV of which tokens, page by page: prompts that begin alike are computed once.

Agents of a step have the same instructions, tools and examples in front of different questions. Only whole pages are
shared, so that nothing has to be copied.
"""

from __future__ import annotations

from collections.abc import Iterator

from palestra.engine.session import Session


class PrefixIndex:
    """Finds the session that begins with most of another one's pages.

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
