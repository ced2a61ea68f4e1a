"""What a person who watches a run is told."""

from __future__ import annotations

from pathlib import Path


class Watcher:
    """This one is silent; a face overrides what it shows."""

    def started(self, folder: Path) -> None:
        """The run has its folder; whatever happens now, it can be resumed from there."""

    def phase(self, name: str, total: int) -> None:
        """A stretch of work begins: `total` rollouts to score or steps to train."""

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        """`done` of the phase's total are finished."""

    def note(self, text: str) -> None: ...
