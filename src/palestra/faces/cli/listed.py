"""What every training in a terminal does besides training: it is listed, and SIGTERM ends it as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from palestra.faces.cli.display import Display


@contextmanager
def listed(display: Display) -> Iterator[None]:
    """Put the run into the index from its first moment to its last, unless a supervisor does."""
    with _terminated_like_ctrl_c():
        if _is_looked_after():
            yield
            return
        from palestra.runs.foreground import ForegroundRun

        run = ForegroundRun()
        display.on_start = run.begin
        try:
            yield
        except KeyboardInterrupt:
            run.end("stopped")
            raise
        except BaseException as error:
            run.end("failed", f"{type(error).__name__}: {error}")
            raise
        run.end("completed")


def refuse_busy(folder: Path) -> None:
    """Two trainings in one folder would ruin it: say so before anything is loaded."""
    if not _is_looked_after():
        from palestra.runs.foreground import ForegroundRun

        ForegroundRun().refuse_busy(folder)


def _is_looked_after() -> bool:
    """Whether a supervisor keeps the run's row. On Windows nobody does: processes and locks are different there."""
    from palestra.runs.processes import MARK

    return MARK in os.environ or sys.platform == "win32"


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM means whatever Ctrl-C means at that moment: be remembered during a step, cancel what is sampled."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
