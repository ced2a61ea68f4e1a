"""The Learner seam: one optimizer step, publish the weights, save, load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from palestra.core.config import TrainSection
from palestra.core.types import Sample


class Learner(Protocol):
    """Something that improves a policy from samples. Metrics are returned, never printed."""

    def step(self, samples: Sequence[Sample], objective: TrainSection) -> dict[str, float]: ...

    def skip(self) -> None:
        """A step in which there was nothing to learn: schedules go on all the same."""
        ...

    def publish(self) -> int:
        """Make the new weights the sampling policy's; gives the new policy version."""
        ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...
