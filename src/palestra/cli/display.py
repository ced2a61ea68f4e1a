"""The display of a training on the command line: `--dry-run` ends it in time, Ctrl-C says how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import click
from rich.console import Console

from palestra.cli.common import load_libraries
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_path
from palestra.run import Watching
from palestra.train.interrupt import sigterm_as_ctrl_c
from palestra.train.progress import Display, make_display


class DryRun(Exception):
    """All is ready to start, and nothing more was asked for."""


def _end_dry_run() -> None:
    raise DryRun


def watching(console: Console, command: str, *, dry_run: bool = False) -> Watching:
    """A display for a run whose config is not known yet; `command` continues the run with --resume."""
    return partial(training_display, console, command=command, dry_run=dry_run)


@contextmanager
def training_display(console: Console, config: RunConfig, command: str, *, dry_run: bool = False) -> Iterator[Display]:
    """The display of a training, once torch is loaded; Ctrl-C ends it with the command that continues the run."""
    load_libraries(console, config.model.name, is_needed=config.backend != "tinker")
    display = make_display(console, config.track.log_every)
    if dry_run:
        display.on_start, display.ends_at_start = _end_dry_run, True
    try:
        with sigterm_as_ctrl_c(), display:
            yield display
    except KeyboardInterrupt:
        if display.run_dir is None:
            raise
        click.secho("\nStopped; every finished step is saved. Continue with:", fg="yellow", err=True)
        folder = shlex.quote(show_path(display.run_dir))
        click.echo(f"  {command} --resume {folder}", err=True)
        if RunFolder(display.run_dir).last_checkpoint() is not None:
            click.echo(f"or end it there, scored and saved:\n  palestra runs finish {folder}", err=True)
        raise click.exceptions.Exit(130) from None
