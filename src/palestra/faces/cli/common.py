"""What several commands share: options, numbers and paths as text, loading torch.

Imports nothing heavy: some commands must answer at once.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import PalestraError

if TYPE_CHECKING:
    from rich.console import Console

# all but tab and newline; also those that reverse the direction of writing
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_BARS = "▁▂▃▄▅▆▇█"

config_option = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings from YAML."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
json_line_option = click.option(
    "--json", "as_json", is_flag=True, help="End stdout with one line of JSON; all else goes to stderr."
)
dtype_option = click.option("--dtype", default="auto", type=click.Choice(["auto", "float32", "bfloat16", "float16"]))
device_option = click.option("--device", default="auto", help="auto, cpu, cuda, cuda:0, …")


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--debug`: show a traceback instead of a one-line error."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ["PALESTRA_DEBUG"] = "1"

    return click.option(
        "--debug", is_flag=True, is_eager=True, expose_value=False, callback=remember, help="Show tracebacks of errors."
    )(command)


def plot_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--plot FILE.svg`; a bad path is refused before the work, not after it."""

    def check(ctx: click.Context, param: click.Parameter, plot: Path | None) -> Path | None:
        if plot is not None and plot.suffix.lower() != ".svg":
            raise PalestraError(f"--plot {plot} is no .svg file; charts are written as SVG, for example chart.svg")
        if plot is not None and not plot.parent.is_dir():
            raise PalestraError(f"--plot {plot}: there is no folder {plot.parent}; make it, or name another")
        return plot

    return click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", callback=check, help=help)


def print_sections(
    sections: Iterable[tuple[str, Iterable[tuple[str, str]]]], width: int = 100, column: int = 44
) -> None:
    """Titled lists of names with their descriptions, laid out as --help is."""
    formatter = click.HelpFormatter(width=width)
    for title, rows in sections:
        with formatter.section(title):
            formatter.write_dl(list(rows), col_max=column)
    click.echo(formatter.getvalue().rstrip())


def sparkline(shares: list[float], width: int) -> str:
    """Numbers in 0..1 as a line of bars; neighbours are averaged until they fit.

    >>> sparkline([0.0, 0.5, 1.0], width=10)
    '▁▅█'
    """
    count = min(width, len(shares))
    edges = [round(i * len(shares) / count) for i in range(count + 1)]
    means = [sum(shares[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    return "".join(_BARS[min(int(m * len(_BARS)), len(_BARS) - 1)] for m in means)


def show_seconds(seconds: float) -> str:
    """42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def show_size(count: float) -> str:
    """
    >>> show_size(900), show_size(5_000_000), show_size(3 * 2**30)
    ('1 kB', '5 MB', '3.2 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if unit == "GB" else f"{count / size:.0f} {unit}"
    return f"{count / 1e3:.0f} kB"


def visible(text: str) -> str:
    """Text of a model, a tool or a log for the terminal: escape sequences and control characters are shown, not obeyed.

    >>> visible("a\\x1b[31mred\\x07")
    'a\\\\x1b[31mred\\\\x07'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show_path(path: Path) -> str:
    """Relative to the working directory if the path is below it, so that it can be copied from the screen."""
    absolute = path.resolve()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def absolute_name(name: str) -> str:
    """A file (or FILE:CLASS) with its absolute path, so that it is found from any folder; other names unchanged."""
    file, colon, class_name = name.partition(":")
    return f"{Path(file).resolve()}{colon}{class_name}" if file.endswith(".py") else name


def load_libraries(console: Console, model: str) -> None:
    """Import torch and transformers with a status line, and switch off their progress bars.

    They stay on for a model from the hub: they show its download.
    """
    with console.status("loading torch and transformers …"):
        import torch  # noqa: F401
        from transformers.utils.logging import disable_progress_bar

    if model.startswith("palestra/") or Path(model).expanduser().exists():
        disable_progress_bar()
