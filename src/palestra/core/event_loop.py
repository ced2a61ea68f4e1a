"""Blocking work inside a running event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def outside_event_loop(work: Callable[[], T]) -> T:
    """Run blocking work that has an event loop of its own, also when called from a notebook's running loop.

    It runs in this thread, where Ctrl-C arrives: the loop around it, which waits anyway, is set aside meanwhile by the
    functions that asyncio has for authors of event loops.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return work()
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    # Ctrl-C raises KeyboardInterrupt, where asyncio.run would only cancel the task around the work, which cannot notice
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler) if is_main else None
    try:
        return work()
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
