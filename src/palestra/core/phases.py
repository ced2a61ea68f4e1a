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
import time
from types import TracebackType


class Phases(threading.local):
    """A stopwatch with nested phases, for each thread its own. Inside of a phase nothing may be awaited."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()

    def __call__(self, name: str) -> _Phase:
        return _Phase(self, name)

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


class _Phase:
    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        self._phases._count()
        self._phases._open.append(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases._count()
        self._phases._open.pop()


phases = Phases()
