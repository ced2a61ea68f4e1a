"""A training in this process, in the index from its first moment to its last."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.runs.foreground import ForegroundRun
from palestra.runs.processes import RUN_VARIABLE


@contextmanager
def listed(folder: Path) -> Iterator[None]:
    """List the run in the folder, unless its supervisor does. A folder in which another process trains is refused."""
    if has_supervisor():
        yield
        return
    run = ForegroundRun()
    run.begin(folder)
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
    """Refuse a folder in which another process trains, before anything is loaded."""
    if not has_supervisor():
        ForegroundRun().refuse_busy(folder)


def has_supervisor() -> bool:
    """Whether a supervisor keeps the run's row. On Windows, which has no fcntl, runs are not listed at all."""
    return RUN_VARIABLE in os.environ or sys.platform == "win32"
