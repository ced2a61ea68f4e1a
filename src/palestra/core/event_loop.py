"""Blocking work beside a running event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def outside_event_loop(work: Callable[[], T]) -> T:
    """Run blocking work that has an event loop of its own, also when called from a notebook's running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    box: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            box.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="palestra-train")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return box[0]
