"""Several runs side by side: the settings that differ, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from palestra.cli.runs_tables import STATE_COLOURS
from palestra.cli.settings import show
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_path, show_seconds, sparkline, visible
from palestra.evals.run_report.charts import Point, curves_svg
from palestra.runs.reader import Run
from palestra.runs.rebuild import id_of
from palestra.runs.settings import differing_keys, settings_of

_SPARKLINE_WIDTH = 60


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs: its settings, results and curves."""

    run: Run
    label: str  # its id; the folder of a copy, whose id says nothing to a person
    settings: dict[str, Any]
    summary: dict[str, float | None]
    pass_rates: list[Point]
    rewards: list[Point]

    def to_dict(self) -> dict[str, Any]:
        head = {"run_id": self.run.run_id, "name": self.run.name, "state": self.run.state}
        return {**head, **self.summary, "settings": self.settings, "rewards": self.rewards}


def compare_runs(runs: Sequence[Run]) -> list[ComparedRun]:
    return [_compared(run, show_path(run.folder) if run.run_id == id_of(run.folder) else run.run_id) for run in runs]


def _compared(run: Run, label: str) -> ComparedRun:
    folder = RunFolder(run.folder)
    rows, report = folder.metrics(), folder.report() or {}
    trained = [row for row in rows if "reward_mean" in row]
    summary: dict[str, float | None] = {
        "steps": trained[-1]["step"] if trained else 0,
        "reward_first": trained[0]["reward_mean"] if trained else None,
        "reward_last": trained[-1]["reward_mean"] if trained else None,
        "held_out_before": _held_out_rate(report.get("before")),
        "held_out_after": _held_out_rate(report.get("after")),
        "seconds": None if run.started is None or run.ended is None else run.seconds,
    }
    return ComparedRun(
        run,
        label,
        settings_of(folder),
        summary,
        [(row["step"], row["pass_rate"]) for row in trained if "pass_rate" in row],
        [(row["step"], row["reward_mean"]) for row in trained],
    )


def draw(compared: Sequence[ComparedRun]) -> str:
    """The reward curves as SVG."""
    curves = {f"{one.label} {one.run.name}": one.rewards for one in compared if one.rewards}
    if not curves:
        raise PalestraError("none of these runs has finished a step; there is no curve to draw yet")
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


def _held_out_rate(evaluation: Any) -> float | None:
    """None where the training cases were scored, because none were held out."""
    match evaluation:
        case {"split": "train"}:
            return None
        case {"pass_rate": {"rate": int() | float() as rate}}:
            return rate
    return None
