"""Calling code that Palestra did not write (tools, measures) without blocking, hanging or dying of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


class CallTimeout(Exception):
    """The called code took longer than its time limit."""


async def call_with_limit(fn: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The result of `fn`: async functions run on this event loop, all others in a thread of their own.

    What `fn` raises is raised; running past the limit raises CallTimeout.
    """
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            if inspect.iscoroutinefunction(fn):
                return await fn(*args, **kwargs)
            result = await _in_thread(lambda: fn(*args, **kwargs))
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if scope.expired():
            raise CallTimeout(f"took longer than {timeout_s:g} s") from None
        raise


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in a daemon thread: one that hangs uses up no pool, and does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not done.done():  # the waiter may have given up meanwhile
            done.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(call)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="palestra-call", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value
