"""The progress of a run: a live display on a terminal, lines of text elsewhere."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from palestra.core.config import RunConfig
from palestra.faces.cli.common import load_libraries, show_path, show_seconds, sparkline, visible
from palestra.train.interrupt import sigterm_as_ctrl_c
from palestra.train.watcher import Watcher

_SPARKLINE_WIDTH = 60
_SILENCE_S = 30.0  # a log says something at least this often


class DryRun(Exception):
    """All is ready to start, and nothing more was asked for."""


@dataclass
class Phase:
    """A part of the work that is in progress."""

    name: str
    total: int
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    first: int | None = None  # `done` at the start of the phase: a resumed run does not start at 0
    ends: float | None = None  # when it will be over, as estimated after the last step
    rollouts: int = 0  # of the step in progress
    metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        if self.first is None:
            self.first = done - 1
        self.done, self.metrics, self.rollouts = done, metrics, 0
        now = time.perf_counter()
        self.ends = now + (now - self.began) / max(1, done - self.first) * (self.total - done)

    @property
    def is_training(self) -> bool:
        return self.name == "training"

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Extrapolated from the steps so far; it falls within a step. None before the first one."""
        return None if self.ends is None else max(0.0, self.ends - time.perf_counter())

    @property
    def position(self) -> str:
        """
        >>> Phase("training", 15, done=2, rollouts=9).position
        'step 2/15, 9 rollouts of the next'
        """
        rollouts = f", {self.rollouts} rollouts of the next" if self.rollouts else ""
        return f"{'step ' if self.is_training else ''}{self.done}/{self.total}{rollouts}"

    @property
    def numbers(self) -> list[str]:
        """The main metrics, as text."""
        row = self.metrics
        out = [f"reward {row['reward_mean']:.2f}"] if "reward_mean" in row else []
        if "reward_max" in row:  # the scale: what the worst and the best rollout earned
            out[0] += f" ({row['reward_min']:.3g} to {row['reward_max']:.3g})"
        out += [f"pass rate {row['pass_rate']:4.0%}"] if "pass_rate" in row else []
        out += [f"{row['sample_tokens_per_second']:,.0f} tokens/s"] if "sample_tokens_per_second" in row else []
        return out


class Display(Watcher):
    """A watcher that keeps the run folder and is a context manager."""

    dry_run = False

    def __init__(self, console: Console, log_every: int) -> None:
        self.console = console
        self.log_every = log_every
        self.run_dir: Path | None = None
        self._phase: Phase | None = None

    def started(self, folder: Path) -> None:
        if self.dry_run:
            raise DryRun
        self.run_dir = folder
        self.console.print(Text(f"run folder {show_path(folder)}", style="dim"))

    def note(self, text: str) -> None:
        self.console.print(Text(visible(text), style="dim"))

    def rollout(self) -> None:
        if self._phase is not None:
            self._phase.rollouts += 1

    def warn(self, text: str) -> None:
        self.console.print(Text(f"! {text}", style="yellow"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class LineDisplay(Display):
    """Lines for a log file: one every `log_every` steps, at the start and end of an evaluation, and every 30 s."""

    def __init__(self, console: Console, log_every: int, silence_s: float = _SILENCE_S) -> None:
        super().__init__(console, log_every)
        self._silence_s = silence_s
        self._printed = threading.Event()
        self._closed = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._break_silence, daemon=True, name="progress").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._printed.set()

    def phase(self, name: str, total: int) -> None:
        self._phase = Phase(name, total)
        self._print(f"{name}: {total} {'steps' if self._phase.is_training else 'rollouts'}")

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        phase = self._phase
        if phase is None:
            return
        phase.advance(done, metrics)
        if not phase.is_training:
            if done == phase.total:
                self._print(f"{phase.name}: done in {show_seconds(phase.seconds)}")
        elif done % self.log_every == 0 or done == phase.total:
            left = f"{show_seconds(phase.seconds_left or 0)} left"
            self._print(f"step {done}/{phase.total}  " + "  ".join([*phase.numbers, left]))

    def _break_silence(self) -> None:
        while not self._closed:
            if self._printed.wait(self._silence_s):
                self._printed.clear()
            elif (phase := self._phase) is not None and phase.done < phase.total:
                left = "" if phase.seconds_left is None else f", {show_seconds(phase.seconds_left)} left"
                self._print(f"{phase.name}: {phase.position} after {show_seconds(phase.seconds)}{left}")

    def _print(self, line: str) -> None:
        self._printed.set()
        self.console.print(line, highlight=False, soft_wrap=True)


class LiveDisplay(Display):
    """A progress bar, the metrics of the last step, and a sparkline of the pass rate."""

    def __init__(self, console: Console, log_every: int) -> None:
        super().__init__(console, log_every)
        self._pass_rates: list[float] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_phase()
        self._live.stop()

    def phase(self, name: str, total: int) -> None:
        self._close_phase()
        self._phase = Phase(name, total)

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        if self._phase is not None:
            self._phase.advance(done, metrics)
            if "pass_rate" in metrics:
                self._pass_rates.append(metrics["pass_rate"])

    def _close_phase(self) -> None:
        """Print one line about a phase that has ended."""
        phase, self._phase = self._phase, None
        if phase is not None and phase.done:
            unit = "steps" if phase.is_training else "rollouts"
            mark = "[green]✓[/]" if phase.done == phase.total else "[yellow]…[/]"
            self.console.print(
                f"{mark} {phase.name}  [dim]{phase.done} {unit} in {show_seconds(phase.seconds)}[/]", highlight=False
            )

    def _render(self) -> RenderableType:
        phase = self._phase
        if phase is None:
            return Text("starting …", style="dim")
        left = phase.seconds_left
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text(phase.name, style="bold"),
            ProgressBar(total=phase.total, completed=phase.done, width=32),
            Text(phase.position),
            Text(f"{show_seconds(left)} left" if left is not None else "", style="cyan"),
        )
        lines: list[RenderableType] = [grid]
        if phase.numbers:
            lines.append(Text("   ".join(phase.numbers)))
        if phase.is_training and len(self._pass_rates) > 1:
            lines.append(
                Text.assemble((sparkline(self._pass_rates, _SPARKLINE_WIDTH), "green"), ("  pass rate", "dim"))
            )
        return Group(*lines)


@contextmanager
def training_display(console: Console, config: RunConfig, command: str, *, dry_run: bool = False) -> Iterator[Display]:
    """The display of a training, once torch is loaded; Ctrl-C ends it with the command that continues the run."""
    load_libraries(console, config.model.name)
    display = make_display(console, config.track.log_every)
    display.dry_run = dry_run
    try:
        with sigterm_as_ctrl_c(), display:
            yield display
    except KeyboardInterrupt:
        if display.run_dir is None:
            raise
        click.secho("\nStopped; every finished step is saved. Continue with:", fg="yellow", err=True)
        folder = shlex.quote(show_path(display.run_dir))
        click.echo(f"  {command} --resume {folder}\nor end it there, scored and saved:", err=True)
        click.echo(f"  palestra runs finish {folder}", err=True)
        raise click.exceptions.Exit(130) from None


def make_display(console: Console, log_every: int) -> Display:
    """The live display on a terminal, lines of text elsewhere."""
    return LiveDisplay(console, log_every) if console.is_terminal else LineDisplay(console, log_every)
