"""Calling code that Palestra did not write (tools, measures) without blocking, hanging or dying of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any

MAX_HUNG_CALLS = 500

_hung: set[threading.Thread] = set()  # whose calls ran past their limit; a thread cannot be ended from outside


class CallTimeout(Exception):
    """The called code took longer than its time limit."""


class OutOfThreads(BaseException):
    """No thread is left for a call. That is our failure, not the called code's: `except Exception` around it must
    not take it for the answer of a tool or a measure."""


def hung_calls() -> int:
    """How many calls go on in their threads though their time is over."""
    _hung.intersection_update([thread for thread in list(_hung) if thread.is_alive()])
    return len(_hung)


async def call_with_limit(fn: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The result of `fn`: async functions run on this event loop, all others in a thread of their own.

    What `fn` raises is raised; running past the limit raises CallTimeout, and too many that do so OutOfThreads.
    """
    scope = asyncio.timeout(timeout_s)
    thread: threading.Thread | None = None
    try:
        async with scope:
            if inspect.iscoroutinefunction(fn):
                return await fn(*args, **kwargs)
            thread, done = _start(lambda: fn(*args, **kwargs))
            result, error = await done
            if error is not None:
                raise error
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if not scope.expired():
            raise
        ended = thread is None or not thread.is_alive()
        if not ended:
            _count_hung(thread)
        raise CallTimeout(f"took longer than {timeout_s:g} s{' and was stopped' if ended else ''}") from None


def _count_hung(thread: threading.Thread | None) -> None:
    if thread is not None:
        _hung.add(thread)
    if (count := hung_calls()) > MAX_HUNG_CALLS:
        raise OutOfThreads(
            f"{count} calls of tools, measures or environments ran past their time limit and still hold a thread each. "
            "Give what they wait for a time limit of its own, make them async, or raise rollout.tool_timeout_s"
        )


def _start(call: Callable[[], Any]) -> tuple[threading.Thread, asyncio.Future[tuple[Any, BaseException | None]]]:
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

    thread = threading.Thread(target=work, name="palestra-call", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OutOfThreads(
            f"no thread could be started for a tool, a measure or an environment: {error}. {hung_calls()} calls that "
            "ran past their time limit still hold one; give what they wait for a time limit of its own, or lower "
            "rollout.max_open_episodes"
        ) from error
    return thread, done
