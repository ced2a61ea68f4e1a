"""`palestra runs`: what trains here, in the background or in other terminals."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import run_ids, settings

if TYPE_CHECKING:
    from palestra.runs.manager import Run, RunManager

_PARTS = ("trainer", "env", "api", "supervisor")
_LISTED = 20
_json = click.option("--json", "as_json", is_flag=True, help="JSON on stdout.")


@click.group("runs")
def command() -> None:
    """Look after runs: list, watch, stop, resume, compare.

    \b
    palestra train my_agent.py --detach      starts one in the background
    palestra runs watch k3f9                 any unambiguous beginning of an id will do
    """


@command.command("list")
@click.option("--all", "show_all", is_flag=True, help=f"All, not only the newest {_LISTED}.")
@_json
@settings.debug_option
def list_command(show_all: bool, as_json: bool) -> None:
    """List runs, the newest first: in the background, and in other terminals."""
    from rich.console import Console

    from palestra.faces.cli.runs_tables import runs_table

    runs = _manager().list()
    shown = runs if show_all else runs[:_LISTED]
    if as_json:
        click.echo(json.dumps({"runs": [run.to_dict() for run in shown], "count": len(runs)}))
    elif not runs:
        click.echo("No runs yet; `palestra train --detach` starts one.")
    else:
        Console().print(runs_table(shown))
        if len(shown) < len(runs):
            click.echo(f"{len(runs) - len(shown)} older ones: --all")


@command.command("show")
@run_ids.argument()
@_json
@settings.debug_option
def show(run_id: str, as_json: bool) -> None:
    """Show one run: its state and why, its processes, its numbers, its files."""
    from rich.console import Console

    from palestra.faces.cli.runs_tables import print_run

    manager = _manager()
    run = manager.get(run_ids.find(manager, run_id))
    results = manager.results(run.run_id)
    if as_json:
        click.echo(json.dumps({**run.to_dict(), "results": results}))
    else:
        print_run(Console(), run, results)


@command.command("watch")
@run_ids.argument()
@_json
@settings.debug_option
def watch(run_id: str, as_json: bool) -> None:
    """Follow a run to its end; Ctrl-C leaves it running. Exit status 1 where it has failed.

    With --json, one object a line, whenever something has changed.
    """
    manager = _manager()
    run: Run | None = None
    with _shown(as_json) as tell:
        for run in manager.watch(run_ids.find(manager, run_id)):
            tell(run)
    if run is not None and run.state == "failed":
        raise click.exceptions.Exit(1)


@command.command("logs")
@run_ids.argument()
@click.argument("part", type=click.Choice(_PARTS), default="trainer")
@click.option(
    "--lines", "-n", default=50, show_default=True, type=click.IntRange(1), help="How many of the last lines."
)
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@_json
@settings.debug_option
def logs(run_id: str, part: Any, lines: int, follow: bool, as_json: bool) -> None:
    """Print what a process of a run has said: trainer, env, api or supervisor."""
    manager = _manager()
    run_id = run_ids.find(manager, run_id)
    said = manager.logs(run_id, part, lines)
    if as_json:
        click.echo(json.dumps({"run_id": run_id, "part": part, "lines": said}))
        return
    for line in said:
        click.echo(line)
    if follow:
        _follow(manager, run_id, part)


@command.command("stop")
@run_ids.argument(many=True)
@click.option("--wait", "wait_s", default=60.0, show_default=True, help="Seconds to wait for the end.")
@_json
@settings.debug_option
def stop(run_ids_given: Sequence[str], wait_s: float, as_json: bool) -> None:
    """Stop runs. Each saves a checkpoint first, from which `palestra runs resume` goes on."""
    manager = _manager()
    _each(manager, run_ids_given, as_json, lambda run_id: manager.stop(run_id, wait_s))


@command.command("resume")
@run_ids.argument(many=True)
@click.option("--max-steps", type=click.IntRange(1), help="Make them longer: so many steps in all. Also complete runs.")
@_json
@settings.debug_option
def resume(run_ids_given: Sequence[str], max_steps: int | None, as_json: bool) -> None:
    """Go on with runs that were stopped or have failed, in the background, each from its last checkpoint."""
    manager = _manager()
    _each(manager, run_ids_given, as_json, lambda run_id: manager.resume(run_id, max_steps=max_steps))


@command.command("rm")
@run_ids.argument(many=True)
@click.option("--keep-folder", is_flag=True, help="Only forget it; leave its files.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_json
@settings.debug_option
def remove(run_ids_given: Sequence[str], keep_folder: bool, yes: bool, as_json: bool) -> None:
    """Forget runs that have ended, and delete their folders, with all models and checkpoints in them."""
    manager = _manager()
    runs = [manager.get(run_ids.find(manager, word)) for word in run_ids_given]
    if not yes and not keep_folder:
        listing = "".join(f"\n  {run.folder}" for run in runs)
        click.confirm(f"Delete{listing}\n?", abort=True, err=True)
    for run in runs:
        manager.remove(run.run_id, keep_folder=keep_folder)
    if as_json:
        click.echo(json.dumps({"removed": [run.run_id for run in runs]}))


@command.command("compare")
@run_ids.argument(many=True)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Write the curves as a chart.")
@_json
@settings.debug_option
def compare(run_ids_given: Sequence[str], plot: Path | None, as_json: bool) -> None:
    """Compare two or more runs: where their settings differ, and what came of it.

    \b
    palestra runs compare k3f9 p2x7 --plot curves.svg
    """
    from rich.console import Console

    from palestra.faces.cli.runs_tables import compare_table, print_curves
    from palestra.faces.runs_compare import compare_runs, draw

    if len(set(run_ids_given)) < 2:
        raise PalestraError("one run cannot be compared; give two or more")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise PalestraError(f"--plot {plot} is no .svg file; charts are written as SVG, for example curves.svg")
    manager = _manager()
    compared = [compare_runs(manager, run_ids.find(manager, word)) for word in run_ids_given]
    if plot is not None:
        plot.write_text(draw(compared), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"runs": [one.to_dict() for one in compared], "plot": str(plot) if plot else None}))
        return
    console = Console()
    console.print(compare_table(compared))
    print_curves(console, compared)
    if plot is not None:
        console.print(f"chart {plot}", highlight=False)


def _manager() -> RunManager:
    from palestra.runs.manager import RunManager

    return RunManager()


def _each(manager: RunManager, words: Sequence[str], as_json: bool, act: Any) -> None:
    """Do it to each; where it does not work for one, the others still have their turn."""
    done: list[Run] = []
    errors: list[str] = []
    for word in words:
        try:
            done.append(act(run_ids.find(manager, word)))
        except PalestraError as error:
            errors.append(str(error))
    if as_json:
        click.echo(json.dumps({"runs": [run.to_dict() for run in done], "errors": errors}))
    else:
        for run in done:
            click.echo(f"{run.run_id} {run.name}: {run.state}")
    if errors:
        raise PalestraError("\n".join(errors))


@contextmanager
def _shown(as_json: bool) -> Iterator[Any]:
    """How a run is shown while it changes: JSON lines, a live table on a terminal, plain lines elsewhere."""
    from rich.console import Console

    from palestra.faces.cli.runs_tables import run_line, run_panel

    console = Console()
    if as_json:
        yield lambda run: click.echo(json.dumps(run.to_dict()))
    elif console.is_terminal:
        from rich.live import Live

        with Live(console=console, refresh_per_second=4) as live:
            yield lambda run: live.update(run_panel(run), refresh=True)
    else:
        yield lambda run: click.echo(run_line(run))


def _follow(manager: RunManager, run_id: str, part: str) -> None:
    """Print what is added to a log until the run has ended."""
    from palestra.core.secrets import redact

    path = manager.get(run_id).logs[part]
    with path.open(encoding="utf-8", errors="replace") as file:
        file.seek(0, 2)
        while True:
            active = manager.get(run_id).is_active
            while line := file.readline():
                click.echo(redact(line), nl=False)
            if not active:
                return
            time.sleep(0.3)
