"""A training in this process, in the index from its first moment to its last."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.runs.foreground import ForegroundRun
from palestra.runs.processes import MARK


@contextmanager
def listed(folder: Path) -> Iterator[None]:
    """List the run in the folder, unless its supervisor does. A folder in which another process trains is refused."""
    if MARK in os.environ or sys.platform == "win32":  # Windows has no fcntl, so runs are not listed at all
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
