"""Time limits for code that runs in the calling thread: a chat template, or async user code that does not await.

And blocking work inside a running event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

from palestra.core.errors import CallTimeout

BLOCKED_S = 5.0  # how long a task may block its event loop before a warning names it
USER_CODE = "user code "  # begins the names of the tasks that run it

_CHECK_EVERY_S = 0.1
_SIGNAL = getattr(signal, "SIGURG", None)  # ignored where nobody handles it; Windows has none
_deadlines: dict[int, float] = {}  # by thread, of the bodies that run and have not expired
_lock = threading.Lock()  # the end of a body and its expiry exclude each other
_has_deadlines = threading.Event()
_watchdog: threading.Thread | None = None
_may_block_s: ContextVar[float] = ContextVar("may_block_s")  # of async user code, and of the tasks that it starts
_blocking: tuple[asyncio.Task[Any], float] | None = None  # the last that was interrupted, and for how long it blocked
_watched: WeakSet[asyncio.AbstractEventLoop] = WeakSet()

log = logging.getLogger("palestra")


class TimeLimitError(Exception):
    """Raised inside a body that takes too long."""

    def __str__(self) -> str:
        return "it took longer than its time limit"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the body if it takes longer.

    Works in any thread, but a call into C that waits is interrupted in the main thread alone.

    One thread watches all limits: a template is rendered hundreds of times in a step, too often to start a thread.
    Limits of one thread cannot be nested.
    """
    global _watchdog
    if _watchdog is None:
        _handle_interrupts()
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
    if raised is not None and thread == threading.main_thread().ident:
        _interrupt()


def limit_blocking(seconds: float) -> None:
    """In a task of async user code: raise CallTimeout in it, or in one that it starts, if that blocks longer.

    Only what blocks the main thread can be interrupted; elsewhere, and after BLOCKED_S, a warning names it.
    """
    _may_block_s.set(seconds)
    loop = asyncio.get_running_loop()
    if loop not in _watched:
        _watched.add(loop)
        _handle_interrupts()
        threading.Thread(target=_watch_tasks, args=[loop], name="palestra-blocked", daemon=True).start()


def _watch_tasks(loop: asyncio.AbstractEventLoop) -> None:
    global _blocking
    last, count = None, 0
    while not loop.is_closed():
        time.sleep(BLOCKED_S / 5)
        task = asyncio.current_task(loop)
        last, count = task, count + 1 if task is last else 0
        if count >= 5 and task is not None and (name := _name(task)):
            if count == 5:
                text = "%s blocks the event loop, for %g s so far; await what it waits for, or make it a plain function"
                log.warning(text, name, BLOCKED_S)
            _blocking = task, count * BLOCKED_S / 5
            _interrupt()


def _name(task: asyncio.Task[Any]) -> str:
    """The name of what a task runs, or nothing for our own code."""
    if (name := task.get_name()).startswith(USER_CODE):
        return name.removeprefix(USER_CODE)
    frame = getattr(coroutine := task.get_coro(), "cr_frame", None)
    is_ours = frame is None or str(frame.f_globals.get("__name__")).startswith("palestra.")
    return "" if is_ours else str(getattr(coroutine, "__qualname__", "a task"))


def _handle_interrupts() -> None:
    is_main = threading.current_thread() is threading.main_thread()
    if _SIGNAL and is_main and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _on_interrupt)


def _interrupt() -> None:
    """Wake the main thread from what it waits for, so that what is to be raised in it is."""
    if _SIGNAL and signal.getsignal(_SIGNAL) is _on_interrupt:
        signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    limit_s = _may_block_s.get(None)
    if _blocking is None or limit_s is None or limit_s > _blocking[1]:
        return
    try:
        is_running = asyncio.current_task() is _blocking[0]
    except RuntimeError:  # the event loop does not run
        return
    if is_running:
        raise CallTimeout(f"blocked the event loop for more than {limit_s:g} s and was stopped")


def _reset_after_fork() -> None:
    """A forked child has only the thread that forked, and no limits."""
    global _watchdog
    _watchdog = None
    _deadlines.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the body with what a user's signal handler raises, such as that of pytest-timeout or `signal.alarm`.

    In an event loop it would fail the task that happens to run, or be logged. So the handlers do what Ctrl-C does at
    that moment, which ends a training in order, and their exception is raised afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[BaseException] = []

    def guarded(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                on_ctrl_c = signal.getsignal(signal.SIGINT)
                if not callable(on_ctrl_c):
                    raise
                raised.append(error)
                on_ctrl_c(signal.SIGINT, frame)

        return on_signal

    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGINT, _SIGNAL}}
    guards = {number: (handler, guarded(handler)) for number, handler in handlers.items() if callable(handler)}
    for number, (_, guard) in guards.items():
        signal.signal(number, guard)
    try:
        yield
    finally:
        for number, (handler, guard) in guards.items():
            if signal.getsignal(number) is guard:
                signal.signal(number, handler)
        if raised:
            raise raised[0]


T = TypeVar("T")


def outside_event_loop(work: Callable[[], T]) -> T:
    """Run blocking work that has an event loop of its own, also when called from a notebook's running loop.

    It runs in this thread, where Ctrl-C arrives: the loop around it, which waits anyway, is set aside meanwhile by the
    functions that asyncio has for authors of event loops. What other signal handlers raise ends it, too.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        with _ended_by_signals():
            return work()
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    # Ctrl-C raises KeyboardInterrupt, where asyncio.run would only cancel the task around the work, which cannot notice
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    try:
        with _ended_by_signals():
            return work()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
