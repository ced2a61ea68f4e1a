"""Calling code that Palestra did not write (tools, measures) without blocking, hanging or crashing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

MAX_HUNG_CALLS = 500
MAX_IDLE_THREADS = 512
SLOW_S = 0.01  # a call that takes longer has its thread to itself
HURRY_S = 1.0  # after a slow call: so long the event loop does not wait for quick ones
DELIVER_EVERY_S = 0.002


class CallTimeout(Exception):
    """The called code took longer than its time limit."""


class OutOfThreads(BaseException):
    """No thread is left for a call. That is our failure, not the called code's: `except Exception` around it must
    not take it for the answer of a tool or a measure."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call for a thread, and what came of it."""

    run: Callable[[], Any]
    context: contextvars.Context
    value: Any = None
    error: BaseException | None = None
    started: bool = False
    ended: bool = False
    delivered: bool = False  # the event loop has been told
    waiter: asyncio.Future[None] | None = None  # of who waits for that; most need not wait
    wanted: bool = True  # somebody still waits

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class _Desk:
    """The calls of one event loop that wait for a thread, and the outcomes on their way back.

    Most tools and measures take microseconds, less than a thread takes to be handed one. So one thread takes all that
    wait, and the loop sleeps meanwhile: two threads that both want the interpreter take much longer than one after the
    other. Where a call is slow the loop goes on, and more threads join as long as calls are slow.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting: deque[_Call] = deque()
        self.outcomes: deque[_Call] = deque()  # that have ended
        self.lock = threading.Lock()  # a worker that leaves and a call that comes exclude each other
        self.workers: set[_Worker] = set()
        self.drained = threading.Event()
        self.is_lent = False  # the loop sleeps until `drained`
        self._hurry_until = 0.0
        self._loop = loop
        self._watched = self._waking = False

    def submit(self, call: _Call) -> None:
        self.waiting.append(call)
        if not self._watched:
            self._watched = True
            self._loop.call_soon(self._watch)  # when all that run now have said what they want to call

    def wake(self) -> None:
        """Called by workers: outcomes are there."""
        if not self._waking and not self.is_lent:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # before looking: an outcome that comes later wakes again
        while self.outcomes:
            call = self.outcomes.popleft()
            call.delivered = True
            if call.waiter is not None and not call.waiter.done():  # it may have given up meanwhile
                call.waiter.set_result(None)

    def _watch(self) -> None:
        """Give waiting calls a worker, or twice as many as are busy with slow ones; deliver meanwhile."""
        self._deliver()
        with self.lock:
            slow = {w for w in self.workers if time.perf_counter() - w.since > SLOW_S}
            self.workers -= slow  # they go on, and nobody counts on them
            if slow:
                self._hurry_until = time.perf_counter() + HURRY_S
            begins = bool(self.waiting) and not self.workers
            self.is_lent = begins and time.perf_counter() > self._hurry_until
            if begins:
                self.drained.clear()
                self._add_workers(min(len(self.waiting), max(1, 2 * len(slow))))
        if self.is_lent:
            self.drained.wait(SLOW_S)
            self.is_lent = False
            self._deliver()
        self._watched = bool(self.waiting or self.workers)
        if self._watched:
            self._loop.call_later(SLOW_S, self._watch)

    def _add_workers(self, count: int) -> None:
        for _ in range(count):
            try:
                worker = _idle.pop() if _idle else _Worker()
            except RuntimeError as error:
                if not self.workers:
                    self._refuse(error)
                return
            worker.since = time.perf_counter()
            self.workers.add(worker)
            worker.desks.put(self)

    def _refuse(self, error: RuntimeError) -> None:
        text = (
            f"no thread could be started for a tool, a measure or an environment: {error}. {hung_calls()} calls that "
            "ran past their time limit still hold one; give what they wait for a time limit of its own, or lower "
            "rollout.max_open_episodes"
        )
        for call in self.waiting:
            call.error = OutOfThreads(text)
        self.outcomes.extend(self.waiting)
        self.waiting.clear()


class _Worker:
    """A thread that runs calls. Starting one takes longer than most calls, so they are kept.

    A daemon: a call that hangs takes its worker with it, and does not keep the process from ending.
    """

    def __init__(self) -> None:
        self.desks: SimpleQueue[_Desk] = SimpleQueue()
        self.since = 0.0  # when it took the call that it runs
        threading.Thread(target=self._work, name="palestra-call", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._drain(self.desks.get())
            if len(_idle) >= MAX_IDLE_THREADS:
                return
            _idle.append(self)

    def _drain(self, desk: _Desk) -> None:
        woken = time.perf_counter()
        while (call := self._next(desk)) is not None:
            try:
                call.value = call.context.run(call.run)
            except BaseException as caught:
                call.error = caught
            call.ended = True
            desk.outcomes.append(call)
            if not desk.waiting or time.perf_counter() - woken > DELIVER_EVERY_S:
                desk.wake()
                woken = time.perf_counter()

    def _next(self, desk: _Desk) -> _Call | None:
        with desk.lock:
            self.since = time.perf_counter()
            while desk.waiting:
                call = desk.waiting.popleft()
                if call.wanted:
                    call.started = True
                    return call
            desk.workers.discard(self)
            desk.drained.set()
        desk.wake()
        return None


_idle: list[_Worker] = []
_desks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Desk] = WeakKeyDictionary()
_hung: set[_Call] = set()  # ran past their limit; a thread cannot be ended from outside
os.register_at_fork(after_in_child=_idle.clear)  # a forked child has no threads but its own
os.register_at_fork(after_in_child=_desks.clear)


def hung_calls() -> int:
    """How many calls go on in their threads though their time is over."""
    _hung.difference_update([call for call in _hung if call.ended])
    return len(_hung)


async def call_with_limit(fn: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The result of `fn`: async functions run on this event loop, all others in a thread.

    What `fn` raises is raised; running past the limit raises CallTimeout, and too many that do so OutOfThreads.
    """
    if inspect.iscoroutinefunction(fn):
        return await _within(timeout_s, fn(*args, **kwargs))
    call = _start(partial(fn, *args, **kwargs))
    if await _ended_at_once((call,)) and not inspect.isawaitable(call.value):
        return call.result()
    return await _within(timeout_s, _outcome(call), (call,))


async def calls_with_limit(fns: Iterable[Callable[[], Any]], *, timeout_s: float) -> list[Any]:
    """The same for several sync functions at once; the first failure is raised, and what has not begun will not."""
    calls = [_start(fn) for fn in fns]
    if await _ended_at_once(calls):
        return [call.result() for call in calls]
    return list(await _within(timeout_s, asyncio.gather(*map(_outcome, calls)), calls))


async def _ended_at_once(calls: Sequence[_Call]) -> bool:
    """Whether the next turn of the loop has their outcomes: most do, and need no clock."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        _give_up(calls)
        raise
    return all(call.delivered for call in calls)


async def _outcome(call: _Call) -> Any:
    if not call.delivered:
        call.waiter = asyncio.get_running_loop().create_future()
        await call.waiter
    result = call.result()
    return await result if inspect.isawaitable(result) else result


async def _within(timeout_s: float, outcome: Awaitable[Any], calls: Sequence[_Call] = ()) -> Any:
    """What comes of calls, or CallTimeout."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await outcome
    except TimeoutError:
        if not scope.expired():
            raise
        hanging = [call for call in calls if call.started and not call.ended]
        for call in hanging:
            _count_hung(call)
        raise CallTimeout(f"took longer than {timeout_s:g} s{'' if hanging else ' and was stopped'}") from None
    finally:
        _give_up(calls)


def _give_up(calls: Iterable[_Call]) -> None:
    for call in calls:
        call.wanted = False


def _count_hung(call: _Call) -> None:
    _hung.add(call)
    if (count := hung_calls()) > MAX_HUNG_CALLS:
        raise OutOfThreads(
            f"{count} calls of tools, measures or environments ran past their time limit and still hold a thread each. "
            "Give what they wait for a time limit of its own, make them async, or raise rollout.tool_timeout_s"
        )


def _start(fn: Callable[[], Any]) -> _Call:
    loop = asyncio.get_running_loop()
    call = _Call(fn, contextvars.copy_context())
    desk = _desks.get(loop)
    if desk is None:
        desk = _desks[loop] = _Desk(loop)
    desk.submit(call)
    return call
