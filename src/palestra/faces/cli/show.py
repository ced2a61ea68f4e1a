"""Numbers, times and paths as people read them on a terminal; light enough for commands that answer at once."""

from __future__ import annotations

import itertools
from pathlib import Path

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(shares: list[float], width: int) -> str:
    """Numbers in 0..1 as little bars; neighbours are averaged until they fit.

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


def show_path(path: Path) -> str:
    """Relative to here where that is shorter, so that it can be copied from the screen."""
    absolute = path.resolve()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)
