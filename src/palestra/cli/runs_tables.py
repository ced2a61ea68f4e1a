"""Runs on the terminal: a list, one in detail, several compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from palestra.cli.settings import show
from palestra.cli.summary import print_findings
from palestra.core.errors import StateError
from palestra.core.files import folder_size
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_path, show_seconds, show_size, sparkline, visible
from palestra.evals.findings import recorded_findings
from palestra.evals.run_report.charts import curves_svg
from palestra.runs.compare import ComparedRun, differing_keys
from palestra.runs.reader import Run

_SPARKLINE_WIDTH = 60  # characters
_WIDE = 100  # characters
STATE_COLOURS = {"completed": "green", "failed": "red", "running": "cyan", "starting": "cyan", "pending": "yellow"}


def runs_table(runs: Sequence[Run], width: int) -> Table:
    """A narrow terminal has no room for the columns that matter least."""
    headings = ["step", "reward", "correct", "scored", "age", "took", "left", "size"]
    left_out = {"left"} if not any(run.is_active for run in runs) else set()
    left_out |= {"size", "age"} if width < _WIDE else set()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", no_wrap=True)
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("state", no_wrap=True)
    for heading in headings:
        if heading not in left_out:
            table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        state = Text(run.state, style=STATE_COLOURS.get(run.state, ""))
        cells = zip(headings, _cells(run), strict=True)
        table.add_row(run.run_id, Text(run.name), state, *(cell for heading, cell in cells if heading not in left_out))
    return table


def _cells(run: Run) -> tuple[str, ...]:
    numbers = run.progress
    return (
        _step(run),
        _number(numbers.get("reward_mean"), ".2f"),
        _number(numbers.get("percent_correct"), ".0%"),
        _number(numbers.get("eval_percent_correct"), ".0%"),
        _about(time.time() - run.created),
        _about(run.seconds),
        _about(numbers["seconds_left"]) if run.is_active and "seconds_left" in numbers else "",
        show_size(folder_size(run.folder)),
    )


def print_run(console: Console, run: Run, results: dict[str, Any]) -> None:
    """One run in detail, with its files."""
    console.print(run_panel(run))
    rows = {"folder": run.folder, "report": results["report_path"], "model": results["model_path"]}
    rows |= {f"{part} log": path for part, path in run.logs.items() if path.exists()}
    rows |= {"checkpoint": results["checkpoint"]} if run.state in ("stopped", "failed") else {}
    for name, value in rows.items():
        if value is not None:
            console.print(Text.assemble((f"{name:<15}", "dim"), show_path(type(run.folder)(value))), soft_wrap=True)
    folder = RunFolder(run.folder)
    capability = folder.record.get("capability") if folder.has_begun else None
    if isinstance(capability, dict) and isinstance(capability.get("text"), str):
        console.print(Text.assemble((f"{'capability':<15}", "dim"), visible(capability["text"])), soft_wrap=True)
    print_findings(console, recorded_findings(folder, ended=not run.is_active))
    if run.state in ("stopped", "failed"):
        console.print(Text.assemble(("continue with  ", "dim"), f"palestra runs resume {run.run_id}"), soft_wrap=True)


def run_panel(run: Run) -> RenderableType:
    """One run in a few lines."""
    state = (run.state, STATE_COLOURS.get(run.state, ""))
    head = Text.assemble((run.run_id, "bold"), "  ", run.name, "  ", state, "  ", (show_seconds(run.seconds), "dim"))
    lines: list[RenderableType] = [head]
    if run.reason:
        lines.append(Text(run.reason, style="red" if run.state == "failed" else "yellow"))
    lines.append(Text(", ".join(f"{part} {state}" for part, state in run.processes.items()), style="dim"))
    if run.progress:
        lines.append(Text(_numbers(run)))
    return Group(*lines)


def run_line(run: Run) -> str:
    """One run in one line, for a log."""
    reason = f": {run.reason.splitlines()[0]}" if run.reason else ""
    return f"{run.run_id} {run.state}{reason}  {_numbers(run)}".rstrip()


def _numbers(run: Run) -> str:
    values = run.progress
    texts = [f"step {_step(run)}"] if "step" in values else []
    texts += [f"{label} {values[key]:{form}}" for key, label, form in _FORMS if key in values]
    texts += [f"{show_seconds(values['seconds_left'])} left"] if run.is_active and "seconds_left" in values else []
    return "  ".join(texts)


_FORMS = (
    ("reward_mean", "reward", ".2f"),
    ("percent_correct", "correct", ".0%"),
    ("eval_percent_correct", "scored", ".0%"),
    ("loss", "loss", ".4f"),
)


def _step(run: Run) -> str:
    step, total = run.progress.get("step"), run.progress.get("total_steps")
    return "" if step is None else f"{step:g}" if total is None else f"{step:g}/{total:g}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _about(seconds: float) -> str:
    """
    >>> [_about(s) for s in (5, 400, 7300, 200000)]
    ['5 s', '7 min', '2 h', '2 d']
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def draw(compared: Sequence[ComparedRun]) -> str:
    """The reward curves as SVG."""
    curves = {f"{one.label} {one.run.name}": one.rewards for one in compared if one.rewards}
    if not curves:
        raise StateError("none of these runs has finished a step; there is no curve to draw yet")
    bounded = all(0 <= y <= 1 for points in curves.values() for _, y in points)
    return curves_svg(curves, "Mean reward over steps", percent=bounded)


def compare_table(compared: Sequence[ComparedRun]) -> Table:
    """One column per run: results above, settings that differ below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", style="dim")
    for one in compared:
        table.add_column(Text(f"{one.label}\n{one.run.name}"), justify="right")
    table.add_row("state", *[Text(one.run.state, style=STATE_COLOURS.get(one.run.state, "")) for one in compared])
    for name in compared[0].summary:
        table.add_row(name.replace("_", " "), *[_show_result(name, one.summary[name]) for one in compared])
    for key in differing_keys([one.settings for one in compared]):
        table.add_row(key, *[Text(visible(show(one.settings.get(key)))) for one in compared])
    return table


def print_curves(console: Console, compared: Sequence[ComparedRun]) -> None:
    """A sparkline of each run's pass rate over its steps."""
    for one in compared:
        if one.pass_rates:
            bars = sparkline([rate for _, rate in one.pass_rates], _SPARKLINE_WIDTH)
            console.print(Text.assemble(f"{one.label}  ", (bars, "green"), ("  pass rate", "dim")))


def _show_result(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name == "seconds":
        return show_seconds(value)
    return f"{value:.1%}" if name.startswith("held_out") else f"{value:.4g}"
