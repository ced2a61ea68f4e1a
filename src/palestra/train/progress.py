"""The progress of a run that is started from Python: a bar on a terminal and in notebooks, lines of text elsewhere."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from palestra.train.watcher import Watcher

LINE_EVERY_S = 30.0


OnStep = Callable[[int, dict[str, float]], dict[str, float]]  # a step's number and metrics -> those that are shown


def _all_metrics(step: int, metrics: dict[str, float]) -> dict[str, float]:
    return metrics


def console_progress(console: Console | None = None, on_step: OnStep = _all_metrics) -> Bar | Lines:
    """What suits the place where the output goes; to be used in a `with` statement."""
    console = console or Console(stderr=True)
    has_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    return Bar(console, on_step) if console.is_terminal or has_widgets else Lines(console, on_step)


class Bar(Watcher):
    """A progress bar for each phase."""

    def __init__(self, console: Console, on_step: OnStep = _all_metrics) -> None:
        self._on_step = on_step
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._numbers, self._rollouts = "", 0  # of the last step, and in the one that is under way

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def started(self, folder: Path) -> None:
        self.note(f"run folder {folder}")

    def phase(self, name: str, total: int) -> None:
        same = next((task for task in self._progress.tasks if task.description == name), None)
        self._task = same.id if same else self._progress.add_task(name, total=total, numbers="")

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        self._numbers, self._rollouts = _numbers(self._on_step(done, metrics)), 0
        if self._task is not None:
            self._progress.update(self._task, completed=done, numbers=self._numbers)

    def rollout(self) -> None:
        self._rollouts += 1
        if self._task is not None:
            self._progress.update(self._task, numbers=f"{self._numbers}  {self._rollouts} rollouts".lstrip())

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Lines(Watcher):
    """A line when a phase begins and ends, and one every 30 s in between, also while nothing advances."""

    def __init__(self, console: Console, on_step: OnStep = _all_metrics, every_s: float = LINE_EVERY_S) -> None:
        self._console = console
        self._on_step = on_step
        self._every_s = every_s
        self._status = "starting"
        self._rollouts = 0  # in the step that is under way
        self._name, self._total, self._began = "", 0, time.perf_counter()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._tell, name="palestra-progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def started(self, folder: Path) -> None:
        self.note(f"run folder {folder}")

    def phase(self, name: str, total: int) -> None:
        self._name, self._total, self._began = name, total, time.perf_counter()
        self._status = f"{name}: 0/{total}"
        self.note(f"{name}: {total} {'steps' if name == 'training' else 'rollouts'}")

    def rollout(self) -> None:
        self._rollouts += 1

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        self._rollouts = 0
        self._status = f"{self._name}: {done}/{self._total}  {_numbers(self._on_step(done, metrics))}".rstrip()
        if done == self._total:
            self.note(self._line())

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _line(self) -> str:
        more = f"  {self._rollouts} rollouts since" if self._rollouts else ""
        return f"{self._status}{more}  ({time.perf_counter() - self._began:.0f} s)"

    def _tell(self) -> None:
        while not self._ended.wait(self._every_s):
            self.note(self._line())


def _numbers(metrics: Mapping[str, float]) -> str:
    shown = (
        ("loss", "loss {:.4f}"),
        ("reward_mean", "reward {:.3f}"),
        ("pass_rate", "pass rate {:.0%}"),
        ("epoch", "epoch {:.2f}"),
    )
    return "  ".join(text.format(metrics[name]) for name, text in shown if name in metrics)
