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
from time import perf_counter
from types import TracebackType


class Phases:
    """A stopwatch with nested phases, for each thread its own. Inside of a phase nothing may be awaited."""

    def __init__(self) -> None:
        self._threads = _OfThread()

    def __call__(self, name: str) -> _Phase:
        return _Phase(self._threads.watch, name)

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        watch = self._threads.watch
        watch.count()
        taken, watch.seconds = watch.seconds, {}
        return taken


class _Watch:
    __slots__ = ("open", "seconds", "since")

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.open: list[str] = []
        self.since = perf_counter()

    def count(self) -> None:
        now = perf_counter()
        if self.open:
            name = self.open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.since
        self.since = now


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.watch = _Watch()


class _Phase:
    __slots__ = ("_name", "_watch")

    def __init__(self, watch: _Watch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._watch.count()
        self._watch.open.append(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.count()
        self._watch.open.pop()


phases = Phases()
