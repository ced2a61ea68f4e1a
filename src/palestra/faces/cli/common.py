"""What several commands share: numbers and paths as text, loading torch, listing a training in the index.

Imports nothing heavy: some commands must answer at once.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


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


def show_path(path: Path) -> str:
    """Relative to the working directory if the path is below it, so that it can be copied from the screen."""
    absolute = path.resolve()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def load_libraries(console: Console, model: str) -> None:
    """Import torch and transformers with a status line, and switch off their progress bars.

    They stay on for a model from the hub: they show its download.
    """
    with console.status("loading torch and transformers …"):
        from transformers.utils.logging import disable_progress_bar

        import palestra.api  # noqa: F401

    if model.startswith("palestra/") or Path(model).expanduser().exists():
        disable_progress_bar()


@contextmanager
def sigterm_as_ctrl_c(*more: signal.Signals) -> Iterator[None]:
    """SIGTERM (and `more`) does what Ctrl-C does at that moment: wait for the end of a step, or cancel sampling."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, *more) if signal.getsignal(n) is not signal.SIG_IGN]  # nohup: SIGHUP
    before = {n: signal.signal(n, lambda number, frame: signal.raise_signal(signal.SIGINT)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
