"""Calls user code (tools, measures, environments) with a time limit, without blocking the event loop for long.

A call in a burst of 64 takes 20 to 30 µs here, and 100 to 150 µs by `anyio.to_thread` or an executor (2 cores). With
five calls in a rollout that would be 0.5 ms more for each rollout, several percent of a step on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from palestra.core.errors import CallTimeout, UserCodeExit, text_of
from palestra.core.time_limit import USER_CODE, limit_blocking

MAX_HUNG_CALLS = 500
MAX_IDLE_THREADS = 512
SLOW_S = 0.01  # a call that takes longer keeps its thread to itself
NO_BLOCK_AFTER_SLOW_S = 1.0  # how long the event loop does not block for quick calls after a slow one
DELIVER_EVERY_S = 0.002


class OutOfThreads(BaseException):
    """No thread is left for a call: our failure, which `except Exception` must not take for the called code's."""


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Raise UserCodeExit for what is no Exception, so that user code can fail its attempt or its call and no more.

    Ctrl-C, what a signal handler raises, and the cancellation of the task that runs this stay as they are.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception | OutOfThreads) or not _is_of_user(error):
            raise
        raise UserCodeExit(text_of(error)) from error


def _is_of_user(error: BaseException) -> bool:
    """Whether the code inside of `user_code` raised an error, and neither a signal nor the task around it."""
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # no event loop
            task = asyncio.current_task()
            return task is None or not task.cancelling()
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in rollout workers
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return all(frame.f_code not in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass(slots=True, eq=False)
class _Call:
    """A call for a thread, and its outcome."""

    run: Callable[[], Any]
    context: contextvars.Context
    value: Any = None
    error: BaseException | None = None
    started: bool = False
    ended: bool = False
    delivered: bool = False  # to the event loop
    waiter: asyncio.Future[None] | None = None  # set if the caller has to wait
    wanted: bool = True  # the caller still waits

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class _CallQueue:
    """The calls of one event loop that wait for a thread, and their outcomes.

    Most tools and measures take microseconds, less than handing a call to a thread. So one thread runs all waiting
    calls while the loop blocks: two threads that compete for the interpreter lock take much longer than one after the
    other. If a call is slow, the loop continues, and more threads are added as long as calls are slow.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting: deque[_Call] = deque()
        self.outcomes: deque[_Call] = deque()  # that have ended
        self.lock = threading.Lock()  # so that no call is added while the last worker leaves
        self.workers: set[_Worker] = set()
        self.idle = threading.Event()
        self.loop_is_blocked = False  # until `idle` is set
        self._no_block_until = 0.0
        self._loop = loop
        self.is_watched = self._waking = False

    def wake(self) -> None:
        """Called by workers when there are outcomes."""
        if not self._waking and not self.loop_is_blocked:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # before reading: a later outcome wakes again
        while self.outcomes:
            call = self.outcomes.popleft()
            call.delivered = True
            if call.waiter is not None and not call.waiter.done():  # it may have timed out
                call.waiter.set_result(None)

    def watch(self) -> None:
        """Give waiting calls a worker, or twice as many as run slow calls; deliver outcomes."""
        self._deliver()
        with self.lock:
            slow = {w for w in self.workers if time.perf_counter() - w.since > SLOW_S}
            self.workers -= slow  # they finish their call, and are not counted
            if slow:
                self._no_block_until = time.perf_counter() + NO_BLOCK_AFTER_SLOW_S
            begins = bool(self.waiting) and not self.workers
            self.loop_is_blocked = begins and time.perf_counter() > self._no_block_until
            if begins:
                self.idle.clear()
                self._add_workers(min(len(self.waiting), max(1, 2 * len(slow))))
        if self.loop_is_blocked:
            self.idle.wait(SLOW_S)
            self.loop_is_blocked = False
            self._deliver()
        self.is_watched = bool(self.waiting or self.workers)
        if self.is_watched:
            self._loop.call_later(SLOW_S, self.watch)

    def _add_workers(self, count: int) -> None:
        for _ in range(count):
            try:
                worker = _idle_workers.pop() if _idle_workers else _Worker()
            except RuntimeError as error:
                if not self.workers:
                    text = (
                        f"no thread could be started for a tool, a measure or an environment: {error}. {hung_calls()} "
                        "calls that ran past their time limit still hold one; give what they wait for its own time "
                        "limit, or lower rollout.max_open_episodes"
                    )
                    for call in self.waiting:
                        call.error = OutOfThreads(text)
                    self.outcomes.extend(self.waiting)
                    self.waiting.clear()
                return
            worker.since = time.perf_counter()
            self.workers.add(worker)
            worker.queues.put(self)


class _Worker:
    """A daemon thread that runs calls, kept because starting one takes longer than most calls."""

    def __init__(self) -> None:
        self.queues: SimpleQueue[_CallQueue] = SimpleQueue()
        self.since = 0.0  # start of its current call
        threading.Thread(target=self._work, name="palestra-call", daemon=True).start()

    def _work(self) -> None:
        while True:
            queue, woken = self.queues.get(), time.perf_counter()
            while (call := self._next(queue)) is not None:
                try:
                    with user_code():
                        call.value = call.context.run(call.run)
                except BaseException as caught:
                    call.error = caught
                call.ended = True
                queue.outcomes.append(call)
                if not queue.waiting or time.perf_counter() - woken > DELIVER_EVERY_S:
                    queue.wake()
                    woken = time.perf_counter()
            if len(_idle_workers) >= MAX_IDLE_THREADS:
                return
            _idle_workers.append(self)

    def _next(self, queue: _CallQueue) -> _Call | None:
        with queue.lock:
            self.since = time.perf_counter()
            while queue.waiting:
                call = queue.waiting.popleft()
                if call.wanted:
                    call.started = True
                    return call
            queue.workers.discard(self)
            queue.idle.set()
        queue.wake()
        return None


_idle_workers: list[_Worker] = []
_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _CallQueue] = WeakKeyDictionary()
_hung_in_workers = 0
_hung: set[_Call] = set()  # ran past their limit; a thread cannot be ended from outside
os.register_at_fork(after_in_child=_idle_workers.clear)  # a forked child has no threads but its own
os.register_at_fork(after_in_child=_queues.clear)


def hung_calls() -> int:
    """Number of calls that still run in their threads after their time limit, here and in worker processes."""
    for call in list(_hung):
        if call.ended:
            _hung.discard(call)
    return len(_hung) + _hung_in_workers


def note_hung_calls(change: int) -> None:
    """Count the calls of a worker process that hang, or do not any more."""
    global _hung_in_workers
    _hung_in_workers += change


async def call_with_limit(fn: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """The result of `fn`: async functions run on this event loop, all others in a thread.

    What `fn` raises is raised; what is no Exception, as UserCodeExit. Running past the limit raises CallTimeout, also
    in async code that blocks the event loop, and too many calls that do so OutOfThreads.
    """
    if inspect.iscoroutinefunction(fn):
        return await _within(timeout_s, _awaited(fn(*args, **kwargs), timeout_s))
    call = _start(partial(fn, *args, **kwargs))
    if await _ended_immediately((call,)) and not inspect.isawaitable(call.value):
        return call.result()
    return await _within(timeout_s, _outcome(call, timeout_s), (call,))


async def calls_with_limit(fns: Iterable[Callable[[], Any]], *, timeout_s: float) -> list[Any]:
    """Call several sync functions concurrently; raise the first failure and skip calls that have not started."""
    calls = [_start(fn) for fn in fns]
    if await _ended_immediately(calls):
        return [call.result() for call in calls]
    return list(await _within(timeout_s, asyncio.gather(*(_outcome(call, timeout_s) for call in calls)), calls))


async def _ended_immediately(calls: Sequence[_Call]) -> bool:
    """Whether the next turn of the loop has their outcomes: most do, and need no clock."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        for call in calls:
            call.wanted = False
        raise
    return all(call.delivered for call in calls)


async def _outcome(call: _Call, timeout_s: float) -> Any:
    if not call.delivered:
        call.waiter = asyncio.get_running_loop().create_future()
        await call.waiter
    result = call.result()
    return await _awaited(result, timeout_s) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any], timeout_s: float) -> Any:
    """The outcome of async user code: in a task of its own, so that it cannot cancel ours."""

    async def run() -> Any:
        limit_blocking(timeout_s)
        with user_code():
            return await result

    name = getattr(result, "__qualname__", "")
    with user_code():
        return await asyncio.get_running_loop().create_task(run(), name=f"{USER_CODE}{name}")


async def _within(timeout_s: float, outcome: Awaitable[Any], calls: Sequence[_Call] = ()) -> Any:
    """The outcome of calls, or CallTimeout."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await outcome
    except TimeoutError:
        if not scope.expired():
            raise
        hanging = [call for call in calls if call.started and not call.ended]
        _hung.update(hanging)
        if hanging and (count := hung_calls()) > MAX_HUNG_CALLS:
            raise OutOfThreads(
                f"{count} calls of tools, measures or environments ran past their time limit and still hold a thread "
                "each. Give what they wait for its own time limit, make them async, or raise rollout.tool_timeout_s"
            ) from None
        raise CallTimeout(f"took longer than {timeout_s:g} s{'' if hanging else ' and was stopped'}") from None
    finally:
        for call in calls:
            call.wanted = False


def _start(fn: Callable[[], Any]) -> _Call:
    loop = asyncio.get_running_loop()
    queue = _queues.get(loop)
    if queue is None:
        queue = _queues[loop] = _CallQueue(loop)
    queue.waiting.append(call := _Call(fn, contextvars.copy_context()))
    if not queue.is_watched:
        queue.is_watched = True
        loop.call_soon(queue.watch)  # after all tasks that are ready now have submitted their calls
    return call
