"""How much memory this process takes."""

from __future__ import annotations

import resource
import sys


def peak_memory_gib() -> float:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)
