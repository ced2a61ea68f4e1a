"""Freed memory stays in the process (on a CPU, page faults cost a quarter of a decode step) until it is given back."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT_BYTES, _LARGEST_POOLED = 1 << 30, 1 << 25  # the largest value that glibc takes for the second is 32 MiB


def keep_freed_memory() -> bool:
    """Tell glibc to reuse freed activations instead of giving them back and faulting them in again.

    Holds for the whole process, the learner's activations too. False where there is no glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_POOLED) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


def give_freed_memory_back() -> bool:
    """Return what is free at the moment to the operating system; False where there is no glibc."""
    try:
        return bool(ctypes.CDLL("libc.so.6").malloc_trim(0))
    except (OSError, AttributeError):
        return False
