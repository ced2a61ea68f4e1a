"""`palestra runs`: the runs of this machine, in the background and in other terminals."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from palestra.cli.common import PATH, returns_data, returns_data_at_end, table
from palestra.cli.find_run import (
    code_of_run,
    require_run,
    require_run_id,
    require_trust,
    run_argument,
    run_of,
    trust_option,
)
from palestra.cli.settings import show as show_setting
from palestra.cli.summary import print_findings, print_outcome, print_rows
from palestra.core.errors import NotFoundError, PalestraError, SettingError, StateError
from palestra.core.files import cache_folder, folder_size
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.text import show_path, show_seconds, show_size, sparkline, visible
from palestra.evals.findings import recorded_findings
from palestra.evals.run_report.charts import curves_svg
from palestra.runs.manager import RunManager, run_garbage
from palestra.runs.reader import ComparedRun, Run, RunReader, results
from palestra.runs.reader import compared as compared_run

_PARTS = ("trainer", "env", "api", "supervisor")
_MAX_LISTED = 20
_SHOW_EVERY_S = 3.0
_SPARKLINE_WIDTH = 60  # characters
_WIDE = 100  # characters
_STATE_COLOURS = {"completed": "green", "failed": "red", "running": "cyan", "starting": "cyan", "pending": "yellow"}
_NUMBERS = {  # heading -> name in a run's progress, format
    "reward": ("reward_mean", ".2f"),
    "correct": ("percent_correct", ".0%"),
    "scored": ("eval_percent_correct", ".0%"),
    "loss": ("loss", ".4f"),
}


@click.group("runs")
def command() -> None:
    """List, watch, stop, resume and compare runs.

    RUN is a run's id or an unambiguous beginning of it, its name, or its folder.

    \b
    palestra train my_agent.py --detach      start one in the background
    palestra runs watch k3f9                 follow it
    """


def _subcommand(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of the group, with the option --json."""
    return lambda function: command.command(name)(returns_data(function))


@_subcommand("list")
@click.option("--all", "show_all", is_flag=True, help=f"All, not only the newest {_MAX_LISTED}.")
def list_command(show_all: bool, console: Console) -> dict[str, Any]:
    """List runs, the newest first: in the background, and in other terminals."""
    shown, count = RunReader().page(None if show_all else _MAX_LISTED)
    if not console.quiet:  # the sizes of folders take time
        none = "No runs yet; `palestra train --detach` starts one."
        console.print(runs_table(shown, console.width) if shown else none)
    if 0 < len(shown) < count:
        console.print(f"{count - len(shown)} older ones: --all")
    return {"runs": [run.to_dict() for run in shown], "count": count}


def runs_table(runs: Sequence[Run], width: int) -> Table:
    """A list of runs, without the columns that matter least on a narrow terminal."""
    cells: dict[str, Callable[[Run], str | Text]] = {
        "run": lambda run: run.run_id,
        "name": lambda run: Text(run.name),
        "state": _state,
        "step": _step,
        **{heading: partial(_number, heading) for heading in ("reward", "correct", "scored")},
        "age": lambda run: _about(time.time() - run.created),
        "took": lambda run: _about(run.seconds),
        "left": lambda run: _time_left(run, _about),
        "size": lambda run: show_size(folder_size(run.folder)),
    }
    left_out = set() if any(run.is_active for run in runs) else {"left"}
    left_out |= {"size", "age"} if width < _WIDE else set()
    cells = {heading: cell for heading, cell in cells.items() if heading not in left_out}
    numbers = [Column(heading, justify="right", no_wrap=True) for heading in list(cells)[3:]]
    names = [Column("run", no_wrap=True), Column("name", overflow="fold", min_width=12), Column("state", no_wrap=True)]
    listing = Table(*names, *numbers, box=None, pad_edge=False, header_style="dim")
    for run in runs:
        listing.add_row(*(cell(run) for cell in cells.values()))
    return listing


@_subcommand("show")
@run_argument()
def show(run: str, console: Console) -> dict[str, Any]:
    """Show one run: its state and why, its processes, metrics and files."""
    shown = run_of(RunReader(), run)
    numbers = results(shown)
    print_run(console, shown, numbers)
    return {**shown.to_dict(), "results": numbers}


def print_run(console: Console, run: Run, results: dict[str, Any]) -> None:
    console.print(run_panel(run))
    folder, can_resume = RunFolder(run.folder), run.state in ("stopped", "failed")
    paths = {"folder": run.folder, "report": results["report_path"], "model": results["model_path"]}
    paths |= {f"{part} log": path for part, path in run.logs.items() if path.exists()}
    paths |= {"checkpoint": results["checkpoint"]} if can_resume else {}
    print_rows(console, {name: show_path(Path(path)) for name, path in paths.items() if path is not None})
    capability = folder.record.get("capability") if folder.has_begun else None
    if isinstance(capability, dict) and isinstance(capability.get("text"), str):
        print_rows(console, {"capability": visible(capability["text"])})
    print_findings(console, recorded_findings(folder, ended=not run.is_active))
    if can_resume:
        print_rows(console, {"continue with": f"palestra runs resume {run.run_id}"})


def run_panel(run: Run) -> RenderableType:
    took = (f"  {show_seconds(run.seconds)}", "dim")
    head = Text.assemble((run.run_id, "bold"), f"  {run.name}  ", _state(run), took)
    reason = [Text(run.reason, style="red" if run.state == "failed" else "yellow")] if run.reason else []
    processes = Text(", ".join(f"{part} {state}" for part, state in run.processes.items()), style="dim")
    return Group(head, *reason, processes, *([Text(_numbers(run))] if run.progress else []))


def run_line(run: Run) -> str:
    """One run in one line, for a log."""
    reason = f": {run.reason.splitlines()[0]}" if run.reason else ""
    return f"{run.run_id} {run.state}{reason}  {_numbers(run)}".rstrip()


def _numbers(run: Run) -> str:
    texts = [f"step {_step(run)}"] if "step" in run.progress else []
    texts += [f"{heading} {text}" for heading in _NUMBERS if (text := _number(heading, run))]
    texts += [f"{left} left"] if (left := _time_left(run, show_seconds)) else []
    return "  ".join(texts)


def _time_left(run: Run, form: Callable[[float], str]) -> str:
    return form(run.progress["seconds_left"]) if run.is_active and "seconds_left" in run.progress else ""


def _state(run: Run) -> Text:
    return Text(run.state, style=_STATE_COLOURS.get(run.state, ""))


def _step(run: Run) -> str:
    step, total = run.progress.get("step"), run.progress.get("total_steps")
    return "" if step is None else f"{step:g}" if total is None else f"{step:g}/{total:g}"


def _number(heading: str, run: Run) -> str:
    name, form = _NUMBERS[heading]
    return format(run.progress[name], form) if name in run.progress else ""


def _about(seconds: float) -> str:
    """
    >>> [_about(s) for s in (5, 400, 7300, 200000)]
    ['5 s', '7 min', '2 h', '2 d']
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@_subcommand("watch")
@run_argument()
def watch(run: str, console: Console) -> Iterator[dict[str, Any]]:
    """Follow a run to its end; Ctrl-C leaves it running. The exit status is 1 if it has failed.

    With --json, one object per line, whenever the run has changed.
    """
    now: Run | None = None
    is_live = console.is_terminal and not console.quiet
    with Live(console=console, refresh_per_second=4) if is_live else nullcontext() as live:
        for now in RunReader().watch(require_run_id(run)):
            yield now.to_dict()
            if live is None:
                console.out(run_line(now), highlight=False)
            else:
                live.update(run_panel(now), refresh=True)
    if now is not None and now.state == "failed":
        raise click.exceptions.Exit(1)


@_subcommand("logs")
@run_argument()
@click.argument("part", type=click.Choice(_PARTS), default="trainer")
@click.option("--lines", "-n", default=50, show_default=True, type=click.IntRange(1), help="Number of last lines.")
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the run has ended.")
def logs(run: str, part: Any, lines: int, follow: bool, console: Console) -> dict[str, Any]:
    """Print the log of a process of a run: trainer, env, api or supervisor."""
    reader, run_id = RunReader(), require_run_id(run)
    last = reader.logs(run_id, part, lines)
    for line in last:
        console.out(visible(line), highlight=False)
    if follow and not console.quiet:
        for line in reader.follow(run_id, part):
            console.out(visible(line), end="", highlight=False)
    return {"run_id": run_id, "part": part, "lines": last}


@_subcommand("stop")
@run_argument(many=True)
@click.option("--wait", "wait_s", default=900.0, show_default=True, help="Seconds to wait for the end.")
def stop(runs: Sequence[str], wait_s: float, console: Console) -> Iterator[dict[str, Any]]:
    """Stop runs. Each finishes its step and saves a checkpoint, from which `palestra runs resume` continues.

    `palestra runs finish` scores and saves what a stopped run has learned.
    """
    manager = RunManager()

    def stop_one(run_id: str) -> Run:
        shown_s = 0.0

        def on_wait(waited_s: float) -> None:
            nonlocal shown_s
            if waited_s - shown_s >= _SHOW_EVERY_S:
                shown_s = waited_s
                click.echo(f"{run_line(manager.get(run_id))}  finishing its step, {waited_s:.0f} s", err=True)

        return manager.stop(run_id, wait_s, on_wait)

    return _for_each(runs, console, stop_one)


@_subcommand("resume")
@run_argument(many=True)
@click.option("--max-steps", type=click.IntRange(1), help="Steps in total; also for complete runs.")
def resume(runs: Sequence[str], max_steps: int | None, console: Console) -> Iterator[dict[str, Any]]:
    """Continue stopped or failed runs in the background, each from its newest checkpoint that is whole."""
    manager = RunManager()
    return _for_each(runs, console, lambda run_id: manager.resume(run_id, max_steps=max_steps))


@command.command("finish")
@run_argument()
@click.option("--from-checkpoint", metavar="STEP", help="A step, or best. [default: the newest]")
@trust_option
@returns_data_at_end
def finish(run: str, from_checkpoint: str | None, trust: bool, console: Console) -> dict[str, Any]:
    """End a stopped run where it is: score what it has learned, save the model, write the report."""
    from palestra.cli.train import training_display
    from palestra.run import resume as resume_run

    folder = require_run(run)
    require_trust(folder, code_of_run(folder.record), trust)
    if folder.last_checkpoint() is None:
        raise StateError(f"{folder.path} has no checkpoint, so there is nothing to score; continue or remove it")
    resumed = Resume(folder.path, from_checkpoint, finish=True)
    return print_outcome(console, *resume_run(resumed, partial(training_display, console)))


@_subcommand("rm")
@run_argument(many=True)
@click.option("--keep-folder", is_flag=True, help="Only remove it from the list; keep its files.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def remove(runs: Sequence[str], keep_folder: bool, yes: bool, console: Console) -> dict[str, Any]:
    """Remove runs that have ended, and delete their folders with all models and checkpoints in them."""
    manager = RunManager()
    chosen = [manager.get(require_run_id(word)) for word in runs]
    if not yes and not keep_folder:
        listing = "".join(f"\n  {run.folder}" for run in chosen)
        click.confirm(f"Delete{listing}\n?", abort=True, err=True)
    for run in chosen:
        manager.remove(run.run_id, keep_folder=keep_folder)
    return {"removed": [run.run_id for run in chosen]}


@_subcommand("gc")
def gc(console: Console) -> Iterator[dict[str, Any]]:
    """Clean up after runs that have died: end the processes they left behind, and mark them as failed.

    Starting, stopping or resuming a run does the same. Other commands only show that a run has died.
    """
    return _changed(RunManager().gc(), [], console)


def _for_each(words: Sequence[str], console: Console, change: Callable[[str], Run]) -> Iterator[dict[str, Any]]:
    """Change each run; an error with one does not keep the others from being changed."""
    changed: list[Run] = []
    errors: list[str] = []
    for word in words:
        try:
            changed.append(change(require_run_id(word)))
        except PalestraError as error:
            errors.append(str(error))
    yield from _changed(changed, errors, console)


def _changed(runs: Sequence[Run], errors: Sequence[str], console: Console) -> Iterator[dict[str, Any]]:
    yield {"runs": [run.to_dict() for run in runs], "errors": errors}
    for run in runs:
        console.out(f"{run.run_id} {run.name}: {run.state}", highlight=False)
    if errors:
        raise StateError("\n".join(errors))


def _svg_path(ctx: click.Context, param: click.Parameter, plot: Path | None) -> Path | None:
    """A bad path is refused before the work, not after it."""
    if plot is not None and plot.suffix.lower() != ".svg":
        raise SettingError(f"--plot {plot} is no .svg file; charts are written as SVG, for example chart.svg")
    if plot is not None and not plot.parent.is_dir():
        raise NotFoundError(f"--plot {plot}: there is no folder {plot.parent}; make it, or name another")
    return plot


@_subcommand("compare")
@run_argument(many=True)
@click.option("--plot", type=PATH, metavar="FILE.svg", callback=_svg_path, help="Write the curves as a chart.")
def compare(runs: Sequence[str], plot: Path | None, console: Console) -> dict[str, Any]:
    """Compare two or more runs: the settings that differ, and the results.

    \b
    palestra runs compare k3f9 p2x7 --plot curves.svg
    """
    if len(set(runs)) < 2:
        raise SettingError("one run cannot be compared; give two or more")
    reader = RunReader()
    compared = [compared_run(run_of(reader, word)) for word in runs]
    if plot is not None:
        curves = {f"{one.label} {one.run.name}": one.rewards for one in compared if one.rewards}
        if not curves:
            raise StateError("none of these runs has finished a step; there is no curve to draw yet")
        bounded = all(0 <= y <= 1 for points in curves.values() for _, y in points)
        plot.write_text(curves_svg(curves, "Mean reward over steps", percent=bounded), encoding="utf-8")
    console.print(compare_table(compared))
    for one in compared:
        if one.pass_rates:
            bars = sparkline(one.pass_rates, _SPARKLINE_WIDTH)
            console.print(Text.assemble(f"{one.label}  ", (bars, "green"), ("  pass rate", "dim")))
    if plot is not None:
        console.print(f"chart {plot}", highlight=False)
    rows = [
        {"run_id": one.run.run_id, "name": one.run.name, "state": one.run.state, **one.summary,
         "settings": one.settings, "rewards": one.rewards}
        for one in compared
    ]  # fmt: skip
    return {"runs": rows, "plot": str(plot) if plot else None}


def compare_table(compared: Sequence[ComparedRun]) -> Table:
    """One column per run: results above, settings that differ below."""
    headings = ["", *(Text(f"{one.label}\n{one.run.name}") for one in compared)]
    rows = [["state", *(_state(one.run) for one in compared)]]
    for name in compared[0].summary:
        show = (
            show_seconds if name == "seconds" else "{:.1%}".format if name.startswith("held_out") else "{:.4g}".format
        )
        values = [one.summary[name] for one in compared]
        rows.append([name.replace("_", " "), *("–" if value is None else show(value) for value in values)])
    for key in dict.fromkeys(key for one in compared for key in one.settings):
        if len({repr(one.settings.get(key)) for one in compared}) > 1:
            rows.append([key, *(Text(visible(show_setting(one.settings.get(key)))) for one in compared)])
    return table(headings, rows, box=None, pad_edge=False, header_style="bold")


@_subcommand("prune")
@run_argument(many=True, required=False)
@click.option("--keep-cache", is_flag=True, help="Leave the converted GGUF files in the cache.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def prune(runs: Sequence[str], keep_cache: bool, dry_run: bool, yes: bool, console: Console) -> dict[str, Any]:
    """Delete old checkpoints of runs that have ended, and the cache of converted GGUF files.

    Of each run the newest and the best checkpoint stay, so that it can still be resumed; models, metrics, rollouts
    and reports are left alone (`palestra runs rm` deletes whole runs). With RUN…, only of those runs.
    """
    if runs:
        folders = [require_run(word) for word in runs]
    else:
        folders = [RunFolder(run.folder) for run in RunReader().list() if not run.is_active]
    garbage = {path: why for folder in folders for path, why in run_garbage(folder).items()}
    # files that were converted to be loaded: they are converted again when they are needed
    cached = [] if runs or keep_cache else sorted((cache_folder() / "gguf").glob("*"))
    garbage |= dict.fromkeys(cached, "a converted GGUF file")
    rows: list[Any] = [{"path": str(path), "why": why, "bytes": folder_size(path)} for path, why in garbage.items()]
    total = sum(row["bytes"] for row in rows)
    for row in rows:
        console.out(f"{show_size(row['bytes']):>8}  {show_path(Path(row['path']))}  ({row['why']})", highlight=False)
    if garbage and not dry_run:
        if not yes:
            click.confirm(f"Delete {len(garbage)} folders, {show_size(total)}?", abort=True, err=True)
        for path in garbage:
            shutil.rmtree(path, ignore_errors=True)
    done = "would be freed" if dry_run else "freed"
    console.print(f"{show_size(total)} {done}" if garbage else "There is nothing to delete.")
    return {"deleted": not dry_run, "bytes": total, "folders": rows}
