"""A tracking service that fails does not stop the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palestra.core.types import Array, Group

log = logging.getLogger("palestra")

# Each call to a service that is down may take minutes to time out.
MAX_CONSECUTIVE_FAILURES = 3


class MetricsService(Protocol):
    """A service that takes metrics only; rollouts stay in rollouts.jsonl."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class GuardedTracker:
    """A service as a Tracker: its first failure is logged; after three in a row it is not called again."""

    def __init__(self, name: str, service: MetricsService) -> None:
        self._name = name
        self._service = service
        self._warned = False
        self._failures = 0

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        if self._failures < MAX_CONSECUTIVE_FAILURES:
            self._try(lambda: self._service.metrics(step, row))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        pass

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._try(self._service.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s failed (%s: %s); the run goes on, and metrics.jsonl has every number",
                    self._name,
                    type(error).__name__,
                    error,
                )
