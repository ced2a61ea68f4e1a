"""A time limit for code of others that runs in the calling thread and is pure Python, such as a chat template."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LOOK_EVERY_S = 0.1


class TimeLimitError(Exception):
    """Raised inside of what took too long."""


@dataclass(slots=True, eq=False)
class _Limit:
    """The limit of a body that runs. Its end and its expiry exclude each other."""

    thread: int
    deadline: float
    expired: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, now: float) -> None:
        with self.lock:
            if now > self.deadline and not self.expired and self in _running:
                self.expired = True
                _raise_in(self.thread, TimeLimitError)

    def end(self) -> None:
        with self.lock:
            _running.discard(self)
            if self.expired:  # it may not have been raised yet: it must not hit what comes later
                _raise_in(self.thread, None)


_running: set[_Limit] = set()
_began = threading.Event()  # the watchdog has something to watch
_watchdog: threading.Thread | None = None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the body when it takes longer. Works in any thread; a single call into C is not ended.

    One thread watches all limits: a template is rendered hundreds of times in a step, too often to start one each time.
    """
    _start_watchdog()
    limit = _Limit(threading.get_ident(), time.monotonic() + seconds)
    _running.add(limit)
    _began.set()
    try:
        yield
    finally:
        limit.end()


def _start_watchdog() -> None:
    global _watchdog
    if _watchdog is None:
        _watchdog = threading.Thread(target=_watch, name="palestra-time-limit", daemon=True)
        _watchdog.start()


def _watch() -> None:
    while True:
        _began.wait()
        _began.clear()  # before looking: a limit that begins now sets it again
        while _running:
            time.sleep(_LOOK_EVERY_S)
            for limit in list(_running):
                limit.check(time.monotonic())


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _forget_watchdog() -> None:
    """A forked child has no threads but its own, and none of its parent's limits."""
    global _watchdog
    _watchdog = None
    _running.clear()


os.register_at_fork(after_in_child=_forget_watchdog)
