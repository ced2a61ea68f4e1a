"""Where the time of a step goes: each moment of a thread counts for one phase, the innermost that is open.

>>> phases = Phases()
>>> with phases("sample"):
...     with phases("decode"):
...         pass
>>> sorted(phases.take())
['decode', 'sample']
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Phases(threading.local):
    """A stopwatch with nested phases, for each thread its own. Inside of a phase nothing may be awaited."""

    def __init__(self) -> None:  # called by each thread
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        now = perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


phases = Phases()
