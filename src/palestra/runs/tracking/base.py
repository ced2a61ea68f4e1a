"""Trackers: where the metrics and rollouts of a run are written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from palestra.core.types import Array, Group

log = logging.getLogger("palestra")

# Each call to a service that is down may take minutes to time out.
MAX_CONSECUTIVE_FAILURES = 3


class Tracker:
    """Takes metrics and rollouts, once a step, from the training loop. Subclasses override what they store."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        """What the step found for each token of its rollouts, as `train.token_record` says; it may be made later."""

    def flush(self) -> None:
        """Wait until all of it is on disk."""

    def close(self) -> None: ...


class Trackers(Tracker):
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.metrics(step, row)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        for tracker in self._trackers:
            tracker.rollouts(step, groups)

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        for tracker in self._trackers:
            tracker.tokens(step, table)

    def flush(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


class GuardedTracker(Tracker):
    """A service whose failure does not stop the run: the first is logged; after three in a row it is not called."""

    def __init__(self, name: str, service: Tracker) -> None:
        self._name = name
        self._service = service
        self._warned = False
        self._failures = 0

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        if self._failures < MAX_CONSECUTIVE_FAILURES:
            self._try(lambda: self._service.metrics(step, row))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        if self._failures < MAX_CONSECUTIVE_FAILURES:
            self._try(lambda: self._service.rollouts(step, groups))

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
                text = "%s failed (%s: %s); the run goes on, and metrics.jsonl has every number"
                log.warning(text, self._name, type(error).__name__, error)
