"""`palestra runs`: the runs of this machine, in the background and in other terminals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from palestra.cli import runs_tables as tables
from palestra.cli.common import debug_option, json_line_option, plot_option
from palestra.cli.find_run import require_run, require_run_id, run_argument, run_of
from palestra.cli.trust import code_of_run, require_trust, trust_option
from palestra.core.errors import PalestraError, SettingError, StateError
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.show import show_path, show_size, visible
from palestra.runs.compare import compared as compared_run
from palestra.runs.manager import RunManager
from palestra.runs.prune import cache_garbage, run_garbage
from palestra.runs.reader import Run, RunReader, results

_PARTS = ("trainer", "env", "api", "supervisor")
_MAX_LISTED = 20
_TELL_S = 3.0


@click.group("runs")
def command() -> None:
    """List, watch, stop, resume and compare runs.

    RUN is a run's id or an unambiguous beginning of it, its name, or its folder.

    \b
    palestra train my_agent.py --detach      start one in the background
    palestra runs watch k3f9                 follow it
    """


def _subcommand(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command of the group, with the options --json and --debug."""
    json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")
    return lambda function: command.command(name)(json_option(debug_option(function)))


@_subcommand("list")
@click.option("--all", "show_all", is_flag=True, help=f"All, not only the newest {_MAX_LISTED}.")
def list_command(show_all: bool, as_json: bool) -> None:
    """List runs, the newest first: in the background, and in other terminals."""
    shown, count = RunReader().page(None if show_all else _MAX_LISTED)
    if as_json:
        click.echo(json.dumps({"runs": [run.to_dict() for run in shown], "count": count}))
    elif not shown:
        click.echo("No runs yet; `palestra train --detach` starts one.")
    else:
        console = Console()
        console.print(tables.runs_table(shown, console.width))
        if len(shown) < count:
            click.echo(f"{count - len(shown)} older ones: --all")


@_subcommand("show")
@run_argument()
def show(run: str, as_json: bool) -> None:
    """Show one run: its state and why, its processes, metrics and files."""
    found = run_of(RunReader(), run)
    if as_json:
        click.echo(json.dumps({**found.to_dict(), "results": results(found)}))
    else:
        tables.print_run(Console(), found, results(found))


@_subcommand("watch")
@run_argument()
def watch(run: str, as_json: bool) -> None:
    """Follow a run to its end; Ctrl-C leaves it running. The exit status is 1 if it has failed.

    With --json, one object per line, whenever the run has changed.
    """
    now: Run | None = None
    with _printer(as_json) as show_run:
        for now in RunReader().watch(require_run_id(run)):
            show_run(now)
    if now is not None and now.state == "failed":
        raise click.exceptions.Exit(1)


@_subcommand("logs")
@run_argument()
@click.argument("part", type=click.Choice(_PARTS), default="trainer")
@click.option("--lines", "-n", default=50, show_default=True, type=click.IntRange(1), help="Number of last lines.")
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the run has ended.")
def logs(run: str, part: Any, lines: int, follow: bool, as_json: bool) -> None:
    """Print the log of a process of a run: trainer, env, api or supervisor."""
    reader, run_id = RunReader(), require_run_id(run)
    last = reader.logs(run_id, part, lines)
    if as_json:
        click.echo(json.dumps({"run_id": run_id, "part": part, "lines": last}))
        return
    for line in last:
        click.echo(visible(line))
    if follow:
        for line in reader.follow(run_id, part):
            click.echo(visible(line), nl=False)


@_subcommand("stop")
@run_argument(many=True)
@click.option("--wait", "wait_s", default=900.0, show_default=True, help="Seconds to wait for the end.")
def stop(runs: Sequence[str], wait_s: float, as_json: bool) -> None:
    """Stop runs. Each finishes its step and saves a checkpoint, from which `palestra runs resume` continues.

    `palestra runs finish` scores and saves what a stopped run has learned.
    """
    manager = RunManager()

    def stop_one(run_id: str) -> Run:
        told_s = 0.0

        def tell(waited_s: float) -> None:
            nonlocal told_s
            if waited_s - told_s >= _TELL_S:
                told_s = waited_s
                click.echo(f"{tables.run_line(manager.get(run_id))}  finishing its step, {waited_s:.0f} s", err=True)

        return manager.stop(run_id, wait_s, tell)

    _for_each(runs, as_json, stop_one)


@_subcommand("resume")
@run_argument(many=True)
@click.option("--max-steps", type=click.IntRange(1), help="Steps in total; also for complete runs.")
def resume(runs: Sequence[str], max_steps: int | None, as_json: bool) -> None:
    """Continue stopped or failed runs in the background, each from its newest checkpoint that is whole."""
    manager = RunManager()
    _for_each(runs, as_json, lambda run_id: manager.resume(run_id, max_steps=max_steps))


@command.command("finish")
@run_argument()
@click.option("--from-checkpoint", metavar="STEP", help="A step, or best. [default: the newest]")
@trust_option
@json_line_option
@debug_option
def finish(run: str, from_checkpoint: str | None, trust: bool, as_json: bool) -> None:
    """End a stopped run where it is: score what it has learned, save the model, write the report."""
    from palestra.cli.display import watching
    from palestra.cli.summary import print_outcome
    from palestra.run import resume as resume_run

    folder, console = require_run(run), Console(stderr=as_json)
    require_trust(folder, code_of_run(folder.record), trust)
    if folder.last_checkpoint() is None:
        raise StateError(f"{folder.path} has no checkpoint, so there is nothing to score; continue or remove it")
    command = "palestra train"
    if "env_url" in folder.record:
        url = folder.record["env_url"]
        command = "palestra env run-atropos" if "atropos" in folder.record else f"palestra train --env-url {url}"
    _, outcome = resume_run(Resume(folder.path, from_checkpoint, finish=True), watching(console, command))
    print_outcome(console, folder, outcome, as_json)


@_subcommand("rm")
@run_argument(many=True)
@click.option("--keep-folder", is_flag=True, help="Only remove it from the list; keep its files.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def remove(runs: Sequence[str], keep_folder: bool, yes: bool, as_json: bool) -> None:
    """Remove runs that have ended, and delete their folders with all models and checkpoints in them."""
    manager = RunManager()
    found = [manager.get(require_run_id(word)) for word in runs]
    if not yes and not keep_folder:
        listing = "".join(f"\n  {run.folder}" for run in found)
        click.confirm(f"Delete{listing}\n?", abort=True, err=True)
    for run in found:
        manager.remove(run.run_id, keep_folder=keep_folder)
    if as_json:
        click.echo(json.dumps({"removed": [run.run_id for run in found]}))


@_subcommand("gc")
def gc(as_json: bool) -> None:
    """Clean up after runs that have died: end the processes they left behind, and mark them as failed.

    Starting, stopping or resuming a run does the same. Other commands only show that a run has died.
    """
    _print_changed(RunManager().gc(), [], as_json)


@_subcommand("compare")
@run_argument(many=True)
@plot_option("Write the curves as a chart.")
def compare(runs: Sequence[str], plot: Path | None, as_json: bool) -> None:
    """Compare two or more runs: the settings that differ, and the results.

    \b
    palestra runs compare k3f9 p2x7 --plot curves.svg
    """
    if len(set(runs)) < 2:
        raise SettingError("one run cannot be compared; give two or more")
    reader = RunReader()
    compared = [compared_run(run_of(reader, word)) for word in runs]
    if plot is not None:
        plot.write_text(tables.draw(compared), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"runs": [one.to_dict() for one in compared], "plot": str(plot) if plot else None}))
        return
    console = Console()
    console.print(tables.compare_table(compared))
    tables.print_curves(console, compared)
    if plot is not None:
        console.print(f"chart {plot}", highlight=False)


def _for_each(words: Sequence[str], as_json: bool, change: Any) -> None:
    """Change each run; an error with one does not keep the others from being changed."""
    changed: list[Run] = []
    errors: list[str] = []
    for word in words:
        try:
            changed.append(change(require_run_id(word)))
        except PalestraError as error:
            errors.append(str(error))
    _print_changed(changed, errors, as_json)


def _print_changed(runs: Sequence[Run], errors: list[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"runs": [run.to_dict() for run in runs], "errors": errors}))
    else:
        for run in runs:
            click.echo(f"{run.run_id} {run.name}: {run.state}")
    if errors:
        raise StateError("\n".join(errors))


@_subcommand("prune")
@run_argument(many=True, required=False)
@click.option("--keep-cache", is_flag=True, help="Leave the converted GGUF files in the cache.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def prune(runs: Sequence[str], keep_cache: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete old checkpoints of runs that have ended, and the cache of converted GGUF files.

    Of each run the newest and the best checkpoint stay, so that it can still be resumed; models, metrics, rollouts
    and reports are left alone (`palestra runs rm` deletes whole runs). With RUN…, only of those runs.
    """
    if runs:
        folders = [require_run(word) for word in runs]
    else:
        folders = [RunFolder(run.folder) for run in RunReader().list() if not run.is_active]
    garbage = [found for folder in folders for found in run_garbage(folder)]
    garbage += [] if runs or keep_cache else cache_garbage()
    total = sum(found.size for found in garbage)
    if not as_json:
        for found in garbage:
            click.echo(f"{show_size(found.size):>8}  {show_path(Path(found.path))}  ({found.why})")
    if garbage and not dry_run:
        if not yes:
            click.confirm(f"Delete {len(garbage)} folders, {show_size(total)}?", abort=True, err=True)
        for found in garbage:
            found.delete()
    if as_json:
        rows = [{"path": str(found.path), "why": found.why, "bytes": found.size} for found in garbage]
        click.echo(json.dumps({"deleted": not dry_run, "bytes": total, "folders": rows}))
    else:
        word = "would be freed" if dry_run else "freed"
        click.echo(f"{show_size(total)} {word}" if garbage else "There is nothing to delete.")


@contextmanager
def _printer(as_json: bool) -> Iterator[Any]:
    """A function that shows a changing run: JSON lines, a live table on a terminal, or lines of text."""
    console = Console()
    if as_json:
        yield lambda run: click.echo(json.dumps(run.to_dict()))
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda run: live.update(tables.run_panel(run), refresh=True)
    else:
        yield lambda run: click.echo(tables.run_line(run))
