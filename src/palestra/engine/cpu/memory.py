"""Freed memory stays in the process until the engine sleeps: page faults cost a quarter of a decode step on a CPU."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_RETAINED_BYTES, _MAX_POOLED_BYTES = 1 << 30, 1 << 25  # glibc takes at most 32 MiB for the second


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed activations instead of giving them back and faulting them in again.

    Holds for the whole process, the learner's activations too. False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MAX_POOLED_BYTES) and mallopt(_M_TRIM_THRESHOLD, _RETAINED_BYTES))


def give_freed_memory_back() -> bool:
    """Return what is free at the moment to the operating system; False where there is no glibc."""
    try:
        return bool(ctypes.CDLL("libc.so.6").malloc_trim(0))
    except (OSError, AttributeError):
        return False
