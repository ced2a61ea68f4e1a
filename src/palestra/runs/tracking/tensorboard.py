"""TensorBoard event files in the run folder: `tensorboard --logdir RUN/tensorboard`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from palestra.core.run_folder import RunFolder


class TensorBoardService:
    """One scalar series for each metric."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], resume_after: int | None) -> None:
        # Readers ignore events from purge_step on: a resumed run repeats those steps.
        purge_step = None if resume_after is None else resume_after + 1
        self._writer = SummaryWriter(folder.tensorboard, purge_step=purge_step)
        if resume_after is None:
            self._writer.add_text("config", f"```json\n{json.dumps(settings, indent=1, default=str)}\n```")

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run loses nothing

    def close(self) -> None:
        self._writer.close()
