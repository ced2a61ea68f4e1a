"""The step trainer's progress bar: it is driven from scripts and notebooks, where no face shows one."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from palestra.train.watcher import Watcher


class ProgressBar(Watcher):
    """A bar over `total` steps; `on_step` is called with each step's number and metrics, and gives what is shown."""

    def __init__(self, total: int, on_step: Callable[[int, dict[str, float]], dict[str, float]]) -> None:
        self._on_step = on_step
        self._done = 0
        self._total = total
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]:.4f}  reward {task.fields[reward]:.3f}  epoch {task.fields[epoch]:.2f}"
            ),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar = self._progress.add_task("training", total=total, loss=math.nan, reward=math.nan, epoch=0.0)

    def phase(self, name: str, total: int) -> None:
        self._progress.start()

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        shown = self._on_step(done, metrics)
        reward = shown.get("reward_mean", math.nan)
        self._progress.update(self._bar, advance=1, loss=shown["loss"], reward=reward, epoch=shown["epoch"])
        self._done += 1
        if self._done == self._total:
            self._progress.stop()
