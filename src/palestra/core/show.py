"""Format values for terminals and logs."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

# all but tab and newline; also those that reverse the direction of writing, and lone surrogates
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BARS = "▁▂▃▄▅▆▇█"


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
    try:
        return visible(str(path.resolve().relative_to(Path.cwd())))
    except (ValueError, FileNotFoundError):  # the second: the working directory was deleted
        return visible(os.path.realpath(path) if path.is_absolute() else str(path))
