"""Calls user code (tools, environments, measures, reward functions) by one policy: `call_user_code`.

A sync function runs in a thread: in the `Lane` of its attempt if that has state, else in one of a queue's threads. A
call in a burst of 64 takes 20 to 30 µs there, and 100 to 150 µs by `anyio.to_thread` or an executor (2 cores).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import logging
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from palestra.core.errors import CallTimeout, RolloutError, UserCodeExit, text_of
from palestra.core.time_limit import USER_CODE, limit_blocking

MAX_HUNG_CALLS = 500
MAX_IDLE_THREADS = 512
SLOW_S = 0.01  # a call that takes longer keeps its thread to itself
NO_BLOCK_AFTER_SLOW_S = 1.0  # how long the event loop does not block for quick calls after a slow one
DELIVER_EVERY_S = 0.002
EXIT_LIMIT_S = 60.0  # how long the end of the process waits for what attempts still close

log = logging.getLogger("palestra")


class OutOfThreads(BaseException):
    """No thread is left for a call: our failure, which `except Exception` must not take for the called code's."""


class AttemptStuck(RolloutError):
    """A call ran past its time limit and still occupies the lane of its attempt, so the attempt ends."""


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
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        return True
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in rollout workers
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return all(frame.f_code not in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass(slots=True, eq=False)
class _Call:
    """A call for a thread, and its outcome."""

    run: Callable[[], Any]
    then: Callable[[Any], Any] | None
    context: contextvars.Context
    queue: _CallQueue
    value: Any = None
    error: BaseException | None = None
    began: float | None = None
    ended: bool = False
    delivered: bool = False  # to the event loop
    waiter: asyncio.Future[None] | None = None  # set if the caller has to wait
    wanted: bool = True  # the caller still waits

    def perform(self) -> None:
        self.began = time.monotonic()
        try:
            with user_code():
                self.value = self.context.run(self.run)
                if self.then is not None and not inspect.isawaitable(self.value):
                    self.value = self.context.run(self.then, self.value)
        except BaseException as caught:
            self.error = caught
        self.ended = True
        self.queue.outcomes.append(self)

    def perform_in_lane(self) -> None:
        if self.wanted:
            self.perform()
        self.queue.lane_call_ended(self)


class _CallQueue:
    """The calls of one event loop that wait for a thread, and their outcomes.

    Most tools and measures take microseconds, less than handing a call to a thread. So one thread runs all waiting
    calls while the loop blocks: two threads that compete for the interpreter lock take much longer than one after the
    other. If a call is slow, the loop continues, and more threads are added as long as calls are slow. The loop blocks
    for calls in lanes, too, which begin together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting: deque[_Call] = deque()
        self.outcomes: deque[_Call] = deque()  # that have ended
        self.lock = threading.Lock()  # so that no call is added while the last worker leaves
        self.workers: set[_Worker] = set()
        self.idle = threading.Event()
        self.loop_is_blocked = False  # until `idle` is set
        self._for_lanes: deque[tuple[Lane, _Call]] = deque()  # that have not begun
        self._in_lanes: set[_Call] = set()  # for which the loop blocks
        self._no_block_until = 0.0
        self._loop = loop
        self._is_watched = self._waking = False

    def add(self, call: _Call, lane: Lane | None) -> None:
        """Begin a call after all tasks that are ready now have added theirs."""
        if lane is not None:
            if not self._for_lanes:
                self._loop.call_soon(self._begin_in_lanes)
            self._for_lanes.append((lane, call))
            return
        self.waiting.append(call)
        if not self._is_watched:
            self._is_watched = True
            self._loop.call_soon(self._watch)

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

    def _block(self) -> None:
        """Wait for quick calls, without the interpreter lock that they need."""
        self.idle.wait(SLOW_S)
        self.loop_is_blocked = False
        self._deliver()

    def _watch(self) -> None:
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
            self._block()
        self._is_watched = bool(self.waiting or self.workers)
        if self._is_watched:
            self._loop.call_later(SLOW_S, self._watch)

    def _add_workers(self, count: int) -> None:
        for _ in range(count):
            try:
                worker = _idle_workers.pop() if _idle_workers else _Worker()
            except OutOfThreads as error:
                if not self.workers:
                    for call in self.waiting:
                        call.error = error
                    self.outcomes.extend(self.waiting)
                    self.waiting.clear()
                return
            worker.since = time.perf_counter()
            self.workers.add(worker)
            worker.jobs.put(partial(self._work, worker))

    def _work(self, worker: _Worker) -> None:
        woken = time.perf_counter()
        while (call := self._next(worker)) is not None:
            call.perform()
            if not self.waiting or time.perf_counter() - woken > DELIVER_EVERY_S:
                self.wake()
                woken = time.perf_counter()

    def _next(self, worker: _Worker) -> _Call | None:
        with self.lock:
            worker.since = time.perf_counter()
            while self.waiting:
                call = self.waiting.popleft()
                if call.wanted:
                    return call
            self.workers.discard(worker)
            self.idle.set()
        self.wake()
        return None

    def _begin_in_lanes(self) -> None:
        """Begin one call after the other, so that no two threads compete; all of them where one takes long."""
        with self.lock:
            self._in_lanes.update(call for _, call in self._for_lanes)
            self.loop_is_blocked = time.perf_counter() > self._no_block_until
            self.idle.clear()
        if self.loop_is_blocked:
            self._begin_next()
            self._block()
            slow_since = time.monotonic() - SLOW_S
            if not any(call.began is not None and call.began < slow_since for call in list(self._in_lanes)):
                if self._for_lanes:  # a long burst: the event loop has a round in between
                    self._loop.call_soon(self._begin_in_lanes)
                return
            self._no_block_until = time.perf_counter() + NO_BLOCK_AFTER_SLOW_S
        while self._begin_next():
            pass

    def _begin_next(self) -> bool:
        with self.lock:
            if not self._for_lanes:
                return False
            lane, call = self._for_lanes.popleft()
        lane.jobs.put(call.perform_in_lane)
        return True

    def lane_call_ended(self, call: _Call) -> None:
        with self.lock:
            self._in_lanes.discard(call)
            if not self._in_lanes:
                self.idle.set()
        if self.loop_is_blocked:
            self._begin_next()
        self.wake()


class _Worker:
    """A daemon thread that runs jobs, kept because starting one takes longer than most calls."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.since = 0.0  # start of its current call
        try:
            threading.Thread(target=self._work, name="palestra-call", daemon=True).start()
        except RuntimeError as error:
            raise OutOfThreads(
                f"no thread could be started for a tool, a measure or an environment: {error}. {hung_calls()} "
                "calls that ran past their time limit still hold one; give what they wait for its own time "
                "limit, or lower rollout.max_open_episodes"
            ) from None

    def _work(self) -> None:
        while True:
            self.jobs.get()()
            if len(_idle_workers) >= MAX_IDLE_THREADS:
                return
            _idle_workers.append(self)


class Lane:
    """The thread of one attempt, from a pool, until `end`.

    All sync calls of the attempt run there one after the other, so that what belongs to the thread that made it, such
    as an sqlite3 connection, works in all of them.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.is_stuck = False  # a call ran past its limit
        worker = _idle_workers.pop() if _idle_workers else _Worker()
        worker.jobs.put(self._work)

    def end(self, last: Callable[[], None] | None = None) -> None:
        """Give the thread back after the calls that it still runs, and after `last`. Waits for neither."""
        if last is not None:
            _ending.add(self)
            self.jobs.put(last)
        self.jobs.put(None)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                with user_code():
                    job()
            except Exception as error:
                log.warning("%s", text_of(error, "closing an attempt"))
        _ending.discard(self)


_idle_workers: list[_Worker] = []
_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _CallQueue] = WeakKeyDictionary()
_lane: ContextVar[Lane | None] = ContextVar("lane", default=None)
_ending: set[Lane] = set()  # that still close something
_hung_in_workers = 0
_hung: set[_Call] = set()  # ran past their limit; a thread cannot be ended from outside
for _inherited in (_idle_workers, _queues, _ending):  # a forked child has no threads but its own
    os.register_at_fork(after_in_child=_inherited.clear)


@atexit.register
def _finish_closing() -> None:
    """Let what attempts still close end, such as a container."""
    until = time.monotonic() + EXIT_LIMIT_S
    while _ending and time.monotonic() < until:
        time.sleep(0.01)


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


@contextlib.contextmanager
def in_lane(lane: Lane | None) -> Iterator[None]:
    """Run the sync calls of this context, and of tasks that are created in it, in this lane."""
    token = _lane.set(lane)
    try:
        yield
    finally:
        _lane.reset(token)


async def call_user_code(
    where: str, fn: Callable[..., Any], *args: Any, limit_s: float, then: Callable[[Any], Any] | None = None
) -> Any:
    """The result of `fn`, which may be async, or what `then` makes of it in the same place.

    What either raises, also a BaseException, is raised as RolloutError, which says `where`; and so is running past the
    limit, which begins when a thread begins the call. Too many calls that hang raise OutOfThreads.
    """
    lane = _lane.get()
    try:
        if inspect.iscoroutinefunction(fn):
            return await _awaited(fn(*args), then, limit_s)
        if lane is not None and lane.is_stuck:
            raise CallTimeout("did not begin: an earlier call of the attempt ran past its time limit and still runs")
        loop = asyncio.get_running_loop()
        queue = _queues.get(loop) or _queues.setdefault(loop, _CallQueue(loop))
        call = _Call(partial(fn, *args), then, contextvars.copy_context(), queue)
        queue.add(call, lane)
        try:
            await asyncio.sleep(0)  # most calls have ended then, and need no clock
            if not call.delivered:
                await _ended(call, lane, limit_s)
        finally:
            call.wanted = False
        if call.error is not None:
            raise call.error
        return await _awaited(call.value, then, limit_s) if inspect.isawaitable(call.value) else call.value
    except Exception as error:
        is_lost = lane is not None and lane.is_stuck
        raise (AttemptStuck if is_lost else RolloutError)(text_of(error, where)) from error


async def _ended(call: _Call, lane: Lane | None, limit_s: float) -> None:
    """Wait for a call's end; at its limit, its thread is given up."""
    call.waiter = asyncio.get_running_loop().create_future()
    left = limit_s
    while left > 0:
        await asyncio.wait([call.waiter], timeout=left)
        if call.delivered:
            return
        if call.began is None and lane is not None and lane.is_stuck:
            left = 0
        else:
            left = limit_s if call.began is None else call.began + limit_s - time.monotonic()
    if lane is not None:
        lane.is_stuck = True
    if call.began is not None:
        _hung.add(call)
    if (count := hung_calls()) > MAX_HUNG_CALLS:
        raise OutOfThreads(
            f"{count} calls of tools, measures or environments ran past their time limit and still hold a thread "
            "each. Give what they wait for its own time limit, make them async, or raise rollout.tool_timeout_s"
        )
    raise CallTimeout(f"took longer than {limit_s:g} s")


async def _awaited(result: Awaitable[Any], then: Callable[[Any], Any] | None, limit_s: float) -> Any:
    """The outcome of async user code: in a task of its own, so that it cannot cancel ours."""

    async def run() -> Any:
        limit_blocking(limit_s)
        with user_code():
            value = await result
            return value if then is None else then(value)

    task = asyncio.get_running_loop().create_task(run(), name=f"{USER_CODE}{getattr(result, '__qualname__', '')}")
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            with user_code():
                return await task
    except TimeoutError:
        if not scope.expired():
            raise
        raise CallTimeout(f"took longer than {limit_s:g} s and was stopped") from None
