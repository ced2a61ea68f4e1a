"""Calling code that Palestra did not write (tools, measures) without blocking, hanging or dying of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

MAX_HUNG_CALLS = 500
MAX_IDLE_THREADS = 512


class CallTimeout(Exception):
    """The called code took longer than its time limit."""


class OutOfThreads(BaseException):
    """No thread is left for a call. That is our failure, not the called code's: `except Exception` around it must
    not take it for the answer of a tool or a measure."""


class _Worker:
    """A thread that runs one call after the other. Starting one takes longer than most calls, so they are kept.

    A daemon: a call that hangs takes its worker with it, and does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="palestra-call", daemon=True).start()

    def run(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def _work(self) -> None:
        while True:
            self._calls.get()()
            if len(_idle) >= MAX_IDLE_THREADS:
                return
            _idle.append(self)


@dataclass(slots=True, eq=False)
class _Call:
    """A call in a thread: its outcome, for the event loop, and whether it has ended, though perhaps nobody waits."""

    outcome: asyncio.Future[tuple[Any, BaseException | None]]
    ended: bool = False


_idle: list[_Worker] = []
_hung: set[_Call] = set()  # ran past their limit; a thread cannot be ended from outside
os.register_at_fork(after_in_child=_idle.clear)  # a forked child has no threads but its own


def hung_calls() -> int:
    """How many calls go on in their threads though their time is over."""
    _hung.difference_update([call for call in _hung if call.ended])
    return len(_hung)


async def call_with_limit(fn: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The result of `fn`: async functions run on this event loop, all others in a thread.

    What `fn` raises is raised; running past the limit raises CallTimeout, and too many that do so OutOfThreads.
    """
    scope = asyncio.timeout(timeout_s)
    call: _Call | None = None
    try:
        async with scope:
            if inspect.iscoroutinefunction(fn):
                return await fn(*args, **kwargs)
            call = _start(lambda: fn(*args, **kwargs))
            result, error = await call.outcome
            if error is not None:
                raise error
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        if not scope.expired():
            raise
        hangs = call is not None and not call.ended
        if call is not None and hangs:
            _count_hung(call)
        raise CallTimeout(f"took longer than {timeout_s:g} s{'' if hangs else ' and was stopped'}") from None


def _count_hung(call: _Call) -> None:
    _hung.add(call)
    if (count := hung_calls()) > MAX_HUNG_CALLS:
        raise OutOfThreads(
            f"{count} calls of tools, measures or environments ran past their time limit and still hold a thread each. "
            "Give what they wait for a time limit of its own, make them async, or raise rollout.tool_timeout_s"
        )


def _start(fn: Callable[[], Any]) -> _Call:
    """Run `fn` in a thread, an idle one if there is one."""
    loop = asyncio.get_running_loop()
    call = _Call(loop.create_future())
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if not call.outcome.done():  # the waiter may have given up meanwhile
            call.outcome.set_result((value, error))

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(fn)
        except BaseException as caught:
            error = caught
        call.ended = True
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    _worker().run(work)
    return call


def _worker() -> _Worker:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    try:
        return _Worker()
    except RuntimeError as error:
        raise OutOfThreads(
            f"no thread could be started for a tool, a measure or an environment: {error}. {hung_calls()} calls that "
            "ran past their time limit still hold one; give what they wait for a time limit of its own, or lower "
            "rollout.max_open_episodes"
        ) from error
