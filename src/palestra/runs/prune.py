"""What can be deleted without losing a result: old checkpoints of ended runs, leftovers, cached conversions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palestra.core.files import cache_folder, folder_size
from palestra.core.run_folder import RunFolder
from palestra.runs.folder_lock import holder


@dataclass(frozen=True, slots=True)
class DeletableFolder:
    """A folder that can be deleted, and why."""

    path: Path
    why: str
    size: int

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def run_garbage(run: RunFolder) -> Iterator[DeletableFolder]:
    """All checkpoints but the newest, which can be resumed, and the best; and what a killed trainer left half written.

    Nothing of a run that is being trained.
    """
    if holder(run.path) is not None:
        return
    keep = {run.last_checkpoint(), run.best_checkpoint()}
    for path in run.step_checkpoints():
        if path not in keep:
            yield DeletableFolder(path, "an older checkpoint", folder_size(path))
    for path in sorted(run.checkpoints.glob(".step-*")):
        yield DeletableFolder(path, "half written", folder_size(path))


def cache_garbage() -> Iterator[DeletableFolder]:
    """GGUF files that were converted to be loaded: they are converted again when they are needed."""
    for path in sorted((cache_folder() / "gguf").glob("*")):
        yield DeletableFolder(path, "a converted GGUF file", folder_size(path))
