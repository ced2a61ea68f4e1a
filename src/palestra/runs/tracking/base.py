"""The Tracker protocol: where the metrics and rollouts of a run are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palestra.core.types import Array, Group


class Tracker(Protocol):
    """Takes metrics and rollouts, once a step, from the training loop."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        """What the step found for each token of its rollouts, as `train.token_record` says; it may be made later."""
        ...

    def flush(self) -> None:
        """Wait until all of it is on disk."""
        ...

    def close(self) -> None: ...


class Trackers:
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
