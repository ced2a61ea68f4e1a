"""How a run reports its progress to a person."""

from __future__ import annotations

import logging
from pathlib import Path

from palestra.core.types import Rollout

log = logging.getLogger("palestra")


class Watcher:
    """Silent but for warnings; displays override what they show."""

    run_dir: Path | None = None  # the run folder, once there is one
    ends_at_start = False  # with --dry-run, which leaves no run behind

    def started(self, folder: Path) -> None:
        """The run has its folder; whatever happens now, it can be resumed from there."""

    def phase(self, name: str, total: int | None) -> None:
        """A stretch of work begins: `total` rollouts to score or steps to train; None where it is not known."""

    def busy(self, name: str) -> None:
        """Work without a count begins, such as saving the model."""

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        """`done` of the phase's total are finished."""

    def rollout(self, rollout: Rollout) -> None:
        """One more attempt of the step in progress has ended."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        """Something that keeps the run from learning. Never silent: without a display it goes to the log."""
        log.warning("%s", text)


class SilentWatcher(Watcher):
    """A watcher for all ranks but the first, which reports for all."""

    def warn(self, text: str) -> None: ...
