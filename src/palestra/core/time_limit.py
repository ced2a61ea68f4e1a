"""A time limit for code of others that runs in the calling thread and is pure Python, such as a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimeLimitError(Exception):
    """Raised inside of what took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the body when it takes longer. Works in any thread; a single call into C is not ended."""
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    state = "running"

    def expire() -> None:
        nonlocal state
        with lock:
            if state == "running":
                state = "expired"
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimitError))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            if state == "expired":  # it may not have been raised yet: it must not hit what comes later
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
            state = "ended"
        timer.cancel()
