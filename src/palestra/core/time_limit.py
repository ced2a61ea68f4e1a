"""A time limit for pure Python code that runs in the calling thread, such as a chat template."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CHECK_EVERY_S = 0.1
_deadlines: dict[int, float] = {}  # by thread, of the bodies that run and have not expired
_lock = threading.Lock()  # the end of a body and its expiry exclude each other
_has_deadlines = threading.Event()
_watchdog: threading.Thread | None = None


class TimeLimitError(Exception):
    """Raised inside a body that takes too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the body if it takes longer. Works in any thread; does not interrupt a call into C.

    One thread watches all limits: a template is rendered hundreds of times in a step, too often to start a thread.
    Limits of one thread cannot be nested.
    """
    global _watchdog
    if _watchdog is None:
        _watchdog = threading.Thread(target=_watch, name="palestra-time-limit", daemon=True)
        _watchdog.start()
    thread = threading.get_ident()
    _deadlines[thread] = time.monotonic() + seconds
    _has_deadlines.set()
    try:
        yield
    finally:
        with _lock:
            if _deadlines.pop(thread, None) is None:  # the error may still be pending: it must not hit later code
                _raise_in(thread, None)


def _watch() -> None:
    while True:
        _has_deadlines.wait()
        _has_deadlines.clear()  # before the check: a limit that begins now sets it again
        while _deadlines:
            time.sleep(_CHECK_EVERY_S)
            now = time.monotonic()
            with _lock:
                for thread in [thread for thread, deadline in _deadlines.copy().items() if now > deadline]:
                    del _deadlines[thread]
                    _raise_in(thread, TimeLimitError)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _reset_after_fork() -> None:
    """A forked child has only the thread that forked, and no limits."""
    global _watchdog
    _watchdog = None
    _deadlines.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
