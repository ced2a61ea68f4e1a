"""The step trainer's progress bar: it is driven from scripts and notebooks, where no face shows one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """A bar over `total` steps; call what it gives with each step's metrics."""
    progress = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  reward {task.fields[reward]:.3f}  epoch {task.fields[epoch]:.2f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar = progress.add_task("training", total=total, loss=math.nan, reward=math.nan, epoch=0.0)

    def advance(metrics: Mapping[str, float]) -> None:
        progress.update(bar, advance=1, loss=metrics["loss"], reward=metrics["reward_mean"], epoch=metrics["epoch"])

    with progress:
        yield advance
