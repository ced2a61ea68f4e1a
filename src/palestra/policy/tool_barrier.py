"""Waiting for quick tools between two engine steps."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from statistics import median

from palestra.engine.session import Session

_WINDOW = 8  # rounds of tool calls after which the median follows a change


class ToolBarrier:
    """Knows the sessions between two turns: their caller runs a tool, or is about to close them.

    A step waits a moment for them while they usually come back at once. So a quick tool's answer joins the very
    next step whatever the threads' timing: batches are fuller, and the same seed gives the same batches, hence the
    same numbers to the last bit. Slow tools hold nobody up. With `enabled=False` no step ever waits.
    """

    def __init__(self, enabled: bool = True, quick_s: float = 0.05, patience_s: float = 1.0) -> None:
        self._enabled = enabled
        self._quick_s = quick_s
        self._patience_s = patience_s
        # Judged by the median: a busy machine makes a quick tool slow now and then, a slow tool is slow each time. One
        # value for all that were away together: a pause of the garbage collector makes all of them slow at once.
        self._recent_s: deque[float] = deque([0.0] * _WINDOW, maxlen=2 * _WINDOW - 1)
        self._this_round_s: list[float] = []
        self._left_at: dict[Session, float] = {}
        self._awaited: set[Session] = set()
        self._all_back = asyncio.Event()

    def turn_ended(self, session: Session) -> None:
        self._left_at[session] = time.perf_counter()
        self._awaited.add(session)

    def came_back(self, session: Session) -> None:
        """Its next turn begins, or it is closed."""
        left_at = self._left_at.get(session)
        if left_at is not None:
            self._this_round_s.append(time.perf_counter() - left_at)
        self.forget(session)

    def forget(self, session: Session) -> None:
        """Nobody waits for this one any more."""
        self._left_at.pop(session, None)
        self._awaited.discard(session)
        if not self._awaited:
            self._all_back.set()

    async def wait(self) -> None:
        """Until all are back, or patience runs out; who is not back then is not waited for again."""
        if self._enabled and self._awaited and median(self._recent_s) < self._quick_s:
            self._all_back = asyncio.Event()  # belongs to the loop that waits
            try:
                await asyncio.wait_for(self._all_back.wait(), self._patience_s)
            except TimeoutError:  # once is enough: nobody waits until as many have been quick again
                self._recent_s.extend([self._patience_s] * _WINDOW)
        self._awaited.clear()
        if self._this_round_s:
            self._recent_s.append(median(self._this_round_s))
            self._this_round_s.clear()
