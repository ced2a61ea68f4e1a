"""Options, tables and the loading of torch, for several commands.

Imports nothing heavy, so that short commands stay fast.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import StorageError
from palestra.core.ranks import is_first_rank
from palestra.models.names import is_local

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PATH = click.Path(path_type=Path)
wait_limit_option = click.option(
    "--wait-limit",
    "wait_limit_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Over the wire: stop after this time without a group while the environment fails. 0: never.",
)
dtype_option = click.option("--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16", "float16"]))
device_option = click.option("--device", default="auto", help="auto, cpu, cuda, cuda:0, …")


def returns_data(function: Callable[..., Any], *, quiet: bool = True) -> Callable[..., Any]:
    """Add --json, which prints the data that a command returns, or a line for each object that it yields.

    The command gets a `console` for its text. With --json it is quiet, or writes to stderr.
    """

    @functools.wraps(function)
    def call(*, as_json: bool, **parameters: Any) -> None:
        from rich.console import Console

        is_first = is_first_rank()  # the other ranks of a training print nothing
        returned = function(console=Console(stderr=as_json, quiet=not is_first or (as_json and quiet)), **parameters)
        for data in returned if inspect.isgenerator(returned) else (returned,):
            if as_json and is_first and data is not None:
                click.echo(json.dumps(data, default=str))

    help = "JSON on stdout." if quiet else "A line of JSON on stdout, all else on stderr."
    return click.option("--json", "as_json", is_flag=True, help=help)(call)


returns_data_at_end = functools.partial(returns_data, quiet=False)  # for commands that show their progress


def agent_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what to train without an agent file."""
    for option in (
        click.option("--instructions", metavar="TEXT", help="The system message of our own agent loop, with --cases."),
        click.option("--improved", hidden=True),  # removed
        click.option("--mcp-shared", multiple=True, metavar="COMMAND", help="One such server for all attempts."),
        click.option("--mcp", multiple=True, metavar="COMMAND", help="An MCP server whose tools the agent gets."),
        click.option("--measure", multiple=True, metavar="FILE:NAME", help="A measure; may be repeated."),
        click.option("--held-out", metavar="FILE_OR_SHARE", help="With --cases: cases to score on. [default: 0.2]"),
        click.option("--cases", metavar="FILE", help="Cases as JSON lines: input, expect, and what else you need."),
        click.option("--agent-port", type=click.IntRange(0, 65535), help="Let other agents take cases at this port."),
        click.option("--agent-host", metavar="ADDRESS", help="Where agents reach the model. [default: 127.0.0.1]"),
        click.option("--agent-image", hidden=True),  # removed
        click.option("--agent-cmd", metavar="COMMAND", help="A program that calls the model by its base URL."),
    ):
        function = option(function)
    return function


def out_option(help: str, default: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--out FILE`, whose folder is made; one that cannot be written is refused before the work, not after it."""

    def check(ctx: click.Context, param: click.Parameter, out: Path | None) -> Path | None:
        if out is None:
            return None
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"--out {out} cannot be written ({error.strerror}); choose another") from None
        if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            why = "it is a folder" if out.is_dir() else "no permission"
            raise StorageError(f"--out {out} cannot be written ({why}); choose another")
        return out

    return click.option("--out", type=PATH, default=default, show_default=True, callback=check, help=help)


def print_sections(
    console: Console, sections: Iterable[tuple[str, Iterable[tuple[str, str]]]], width: int = 100, column: int = 44
) -> None:
    """Titled lists of names with their descriptions, laid out as --help is."""
    formatter = click.HelpFormatter(width=width)
    for title, rows in sections:
        with formatter.section(title):
            formatter.write_dl(list(rows), col_max=column)
    console.out(formatter.getvalue().rstrip(), highlight=False)


def table(headings: Iterable[Any], rows: Iterable[Iterable[Any]], **style: Any) -> Table:
    """A table whose first column names the rows; the others hold numbers."""
    from rich.table import Column, Table

    first, *numbers = headings
    columns = [Column(first), *(Column(heading, justify="right") for heading in numbers)]
    made = Table(*columns, **{"title_justify": "left", "caption_justify": "left", **style})
    for row in rows:
        made.add_row(*row)
    return made


def load_libraries(console: Console, model: str, *, is_needed: bool = True) -> None:
    """Import torch and transformers with a status line, and switch off their progress bars.

    They stay on for a model from the hub: they show its download. A model that does not exist is reported before.
    """
    from palestra.models.names import require_model
    from palestra.train.progress import task  # rich, which not every command needs

    if is_needed:
        require_model(model)
    with task(console, "loading torch and transformers"):
        import torch  # noqa: F401
        from transformers.utils.logging import disable_progress_bar
    if is_local(model):
        disable_progress_bar()
