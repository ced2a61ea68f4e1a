"""The progress of long work: a live bar on a terminal, curves in a notebook, lines of text in a log.

Runs have a display, which is a `Watcher`; everything else that takes long is a `task`:

>>> with task(Console(), "saving", total=len(files)) as phase:          # doctest: +SKIP
...     for done, file in enumerate(files, 1):
...         save(file)
...         phase.advance(done)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from palestra.core.text import show_path, show_seconds, show_size, sparkline, visible
from palestra.evals.run_report.charts import charts, fragment, table, text
from palestra.train.watcher import Watcher

LINE_EVERY_S = 30.0  # a log says something at least this often
_SPARKLINE_WIDTH = 60
UPDATE_EVERY_S = 0.5  # of a notebook's output
_SHOWN_STEPS, _SHOWN_LINES = 8, 12  # the last ones, there

Unit = Literal["steps", "rollouts", "bytes", ""]
OnStep = Callable[[int, dict[str, float]], dict[str, float]]  # a step's number and metrics -> those that are shown


def all_metrics(step: int, metrics: dict[str, float]) -> dict[str, float]:
    """Show a step's metrics as they are."""
    return metrics


@dataclass
class Phase:
    """A part of the work that is in progress."""

    name: str
    total: int | None = None  # None where it is not known
    unit: Unit = ""
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    first: int | None = None  # `done` at the start of the phase: a resumed run does not start at 0
    ends: float | None = None  # when it will be over, as estimated after the last step
    rollouts: int = 0  # of the step in progress
    metrics: dict[str, float] = field(default_factory=dict)

    def advance(self, done: int, metrics: dict[str, float] | None = None) -> None:
        if self.first is None:
            self.first = done - 1
        self.done, self.metrics, self.rollouts = done, metrics or {}, 0
        if self.total is not None:
            now = time.perf_counter()
            self.ends = now + (now - self.began) / max(1, done - self.first) * (self.total - done)

    @property
    def is_over(self) -> bool:
        return self.total is not None and self.done >= self.total

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
        >>> Phase("training", 15, "steps", done=2, rollouts=9).position
        'step 2/15, 9 rollouts of the next'
        >>> Phase("tiny.gguf", 5_000_000, "bytes", done=2_000_000).position, Phase("scoring", unit="rollouts").position
        ('2 MB of 5 MB', '')
        """
        if self.total is None:
            return f"{self.done} {self.unit}".rstrip() if self.done else ""
        if self.unit == "bytes":
            return f"{show_size(self.done)} of {show_size(self.total)}"
        rollouts = f", {self.rollouts} rollouts of the next" if self.rollouts else ""
        return f"{'step ' if self.unit == 'steps' else ''}{self.done}/{self.total}{rollouts}"

    @property
    def numbers(self) -> list[str]:
        """The main metrics, as text."""
        row = self.metrics
        out = [f"reward {row['reward_mean']:.2f}"] if "reward_mean" in row else []
        if "reward_max" in row:  # the scale: what the worst and the best rollout earned
            out[0] += f" ({row['reward_min']:.3g} to {row['reward_max']:.3g})"
        out += [f"pass rate {row['pass_rate']:4.0%}"] if "pass_rate" in row else []
        if "demonstrations" in row:
            loss = [f"loss {row['loss']:.3g}"] if "loss" in row else []
            return [*out, *loss, f"{row['demonstrations']:.0f} demonstrations"]
        out += [f"{row['sample_tokens_per_second']:,.0f} tokens/s"] if "sample_tokens_per_second" in row else []
        out += [f"epoch {row['epoch']:.2f}"] if "epoch" in row else []
        return out


class Display(Watcher):
    """A watcher that keeps the run folder and is a context manager."""

    def __init__(self, console: Console, log_every: int = 1, on_step: OnStep = all_metrics) -> None:
        self.console = console
        self.log_every = log_every
        self.run_dir: Path | None = None
        self.on_start: Callable[[], None] = lambda: None
        self._on_step = on_step
        self._phase = Phase("starting")
        self._phases: dict[str, Phase] = {}  # by name: training goes on after an evaluation in between
        self._steps: list[dict[str, float]] = []  # their numbers and metrics

    def started(self, folder: Path) -> None:
        self.on_start()
        self.run_dir = folder
        self.note(f"run folder {show_path(folder)}")

    def phase(self, name: str, total: int | None) -> None:
        unit: Unit = "steps" if name.startswith("training") else "rollouts"
        self.begin(self._phases.setdefault(name, Phase(name, total, unit)))

    def busy(self, name: str) -> None:
        self.begin(Phase(name))

    def begin(self, phase: Phase) -> None:
        self._phase = phase

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        if self._phase.unit == "steps":
            metrics = self._on_step(done, metrics)
            self._steps.append({"step": done, **metrics})
        self._phase.advance(done, metrics)

    def note(self, text: str) -> None:
        self.console.print(Text(visible(text), style="dim"))

    def rollout(self) -> None:
        self._phase.rollouts += 1

    def warn(self, text: str) -> None:
        self.console.print(Text(f"! {text}", style="yellow"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class LineDisplay(Display):
    """Lines for a log file: one every `log_every` steps, at the start and end of an evaluation, and every 30 s."""

    def __init__(
        self, console: Console, log_every: int = 1, on_step: OnStep = all_metrics, *, silence_s: float = LINE_EVERY_S
    ) -> None:
        super().__init__(console, log_every, on_step)
        self._silence_s = silence_s
        self._printed = threading.Event()
        self._closed = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._break_silence, daemon=True, name="palestra-progress").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._printed.set()

    def phase(self, name: str, total: int | None) -> None:
        is_new = name not in self._phases
        super().phase(name, total)
        if is_new:
            self._print(f"{name}: {total} {self._phase.unit}" if total is not None else name)

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        super().advance(done, metrics)
        phase = self._phase
        if phase.unit != "steps":
            if phase.is_over:
                self._print(f"{phase.name}: done in {show_seconds(phase.seconds)}")
        elif done % self.log_every == 0 or phase.is_over:
            left = [] if phase.total is None else [f"{show_seconds(phase.seconds_left or 0)} left"]
            place = f"step {done}" if phase.total is None else f"step {done}/{phase.total}"
            self._print("  ".join([place, *phase.numbers, *left]))

    def _break_silence(self) -> None:
        while not self._closed:
            if self._printed.wait(self._silence_s):
                self._printed.clear()
            elif not (phase := self._phase).is_over:
                left = "" if phase.seconds_left is None else f", {show_seconds(phase.seconds_left)} left"
                position = f": {phase.position} after" if phase.position else " …"
                self._print(f"{phase.name}{position} {show_seconds(phase.seconds)}{left}")

    def _print(self, line: str) -> None:
        self._printed.set()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(Display):
    """A progress bar, the metrics of the last step, and a sparkline of the pass rate."""

    def __enter__(self) -> Self:
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4, transient=True)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close_phase()
        self._live.stop()

    def begin(self, phase: Phase) -> None:
        self._close_phase()
        super().begin(phase)

    def _close_phase(self) -> None:
        """Print one line about a phase of the run that has ended."""
        phase = self._phase
        if phase.name in self._phases and phase.done:
            mark = "[green]✓[/]" if phase.is_over else "[yellow]…[/]"
            took = f"{phase.done} {phase.unit} in {show_seconds(phase.seconds)}"
            self.console.print(f"{mark} {phase.name}  [dim]{took}[/]", highlight=False)

    def _render(self) -> RenderableType:
        phase = self._phase
        left = phase.seconds_left
        grid = Table.grid(padding=(0, 2))
        grid.add_row(
            Text(phase.name, style="bold"),
            ProgressBar(total=phase.total, completed=phase.done, width=32, pulse=phase.total is None),
            Text(phase.position),
            Text(f"{show_seconds(left)} left" if left is not None else show_seconds(phase.seconds), style="cyan"),
        )
        lines: list[RenderableType] = [grid]
        if phase.numbers:
            lines.append(Text("   ".join(phase.numbers)))
        rates = [row["pass_rate"] for row in self._steps if "pass_rate" in row]
        if phase.unit == "steps" and len(rates) > 1:
            curve = sparkline(rates, _SPARKLINE_WIDTH)
            lines.append(Text.assemble((curve, "green"), ("  pass rate", "dim")))
        return Group(*lines)


class NotebookDisplay(Display):
    """Live curves of reward and pass rate, the last steps, and what the run says; it stays when the run has ended."""

    _lines: Sequence[str] = ()
    _handle: Any = None
    _updated = 0.0

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        is_run = self.run_dir is not None or bool(self._phases)
        self._update(fragment(*self._parts()) if is_run else "")

    def begin(self, phase: Phase) -> None:
        super().begin(phase)
        self._refresh(now=True)

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        super().advance(done, metrics)
        self._refresh()

    def rollout(self) -> None:
        super().rollout()
        self._refresh()

    def note(self, line: str) -> None:
        self._say(f'<div class="soft">{text(line)}</div>')

    def warn(self, line: str) -> None:
        self._say(f'<div class="warn">! {text(line)}</div>')

    def _say(self, html: str) -> None:
        self._lines = [*self._lines, html][-_SHOWN_LINES:]
        self._refresh(now=True)

    def _refresh(self, now: bool = False) -> None:
        """Draw at most twice a second: each update is sent to the browser whole."""
        if self._handle is not None and (now or time.monotonic() - self._updated > UPDATE_EVERY_S):
            self._update(fragment(*self._parts()))

    def _update(self, html: str) -> None:
        from IPython.display import HTML

        self._updated = time.monotonic()
        self._handle.update(HTML(html))

    def _parts(self) -> list[str]:
        phase = self._phase
        left = phase.seconds_left
        clock = f"{show_seconds(left)} left" if left and not phase.is_over else show_seconds(phase.seconds)
        amount = "" if phase.total is None else f'value="{phase.done}" max="{max(1, phase.total)}"'
        bar = f"<progress {amount}></progress>"
        head = f"<div><b>{text(phase.name)}</b> {bar} {text(phase.position)} <span class=soft>{clock}</span></div>"
        forms = {"step": "{:.0f}", "reward_mean": "{:.3g}", "pass_rate": "{:.0%}", "loss": "{:.3g}"}
        rows = [
            tuple(form.format(row[key]) if key in row else "" for key, form in forms.items())
            for row in self._steps[: -_SHOWN_STEPS - 1 : -1]
        ]
        return [head, charts(self._steps), table(("step", "reward", "pass rate", "loss"), rows), *self._lines]


def make_display(console: Console, log_every: int = 1, on_step: OnStep = all_metrics) -> Display:
    """The live display on a terminal, curves in a notebook, lines of text elsewhere."""
    if console.is_jupyter:
        return NotebookDisplay(console, log_every, on_step)
    return (LiveDisplay if console.is_terminal else LineDisplay)(console, log_every, on_step)


def console_progress(on_step: OnStep = all_metrics, log_every: int = 1) -> Display:
    """The display of a run that has no command line: started from Python, or in the background."""
    return make_display(Console(stderr=True), log_every, on_step)


@contextmanager
def task(console: Console, name: str, total: int | None = None, unit: Unit = "") -> Iterator[Phase]:
    """Show work that is no run while it lasts; where there is no terminal, only what takes longer than 30 s."""
    with make_display(console) as display:
        phase = Phase(name, total, unit)
        display.begin(phase)
        yield phase
