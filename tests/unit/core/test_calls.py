import asyncio
import os
import signal
import sys
import threading
import time

import pytest

from palestra.core import calls, time_limit
from palestra.core.calls import AttemptStuck, Lane, OutOfThreads, call_user_code, hung_calls, in_lane, user_code
from palestra.core.errors import RolloutError, UserCodeExit, text_of


@pytest.fixture
def release():
    """Set at the end, so that no thread hangs on."""
    event = threading.Event()
    yield event
    event.set()


def call(fn, *args, limit_s=5.0):
    return asyncio.run(called(fn, *args, limit_s=limit_s))


def called(fn, *args, limit_s):
    return call_user_code("the tool", fn, *args, limit_s=limit_s)


def test_sync_functions_run_in_a_thread_and_async_ones_on_the_event_loop():
    async def where():
        return threading.get_ident()

    assert call(threading.get_ident) != threading.get_ident()
    assert call(where) == threading.get_ident()
    assert call(lambda: where()) == threading.get_ident(), "a sync function that returns a coroutine"


def test_a_timeout_error_of_the_function_itself_is_not_taken_for_ours():
    def fails():
        raise TimeoutError("the database is slow")

    with pytest.raises(RolloutError, match=r"^the tool raised TimeoutError: the database is slow$"):
        call(fails)


def test_what_is_made_of_a_result_is_made_where_the_function_runs():
    async def where():
        return threading.get_ident()

    def both(result):
        return result, threading.get_ident()

    async def main():
        ran, made = await call_user_code("", threading.get_ident, limit_s=5, then=both)
        assert ran == made != threading.get_ident()
        assert await call_user_code("", where, limit_s=5, then=lambda ident: ident + 1) == threading.get_ident() + 1
        with pytest.raises(RolloutError, match="the tool raised ZeroDivisionError"):
            await call_user_code("the tool", int, limit_s=5, then=lambda value: 1 / value)

    asyncio.run(main())


def test_quick_calls_have_ended_in_the_next_turn_of_the_loop_all_in_one_thread():
    async def main():
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        found = await asyncio.gather(*(called(threading.get_ident, limit_s=5.0) for _ in range(100)))
        counting.cancel()
        return turns, set(found)

    turns, threads = asyncio.run(main())
    assert turns <= 5
    assert len(threads) == 1


def test_the_loop_goes_on_while_a_call_is_slow(release):
    async def main():
        slow = asyncio.create_task(called(release.wait, 120, limit_s=150.0))
        await asyncio.sleep(0.05)
        quick = await called(lambda: "quick", limit_s=100.0)
        is_slow = not slow.done()
        release.set()
        return quick, is_slow, await slow

    assert asyncio.run(main()) == ("quick", True, True)


def until(condition):
    deadline = time.perf_counter() + 5
    while not condition() and time.perf_counter() < deadline:
        time.sleep(0.005)
    return condition()


def test_only_a_call_that_has_ended_is_said_to_be_stopped(release):
    with pytest.raises(RolloutError) as hanging:
        call(release.wait, 30, limit_s=0.1)
    with pytest.raises(RolloutError) as stopped:
        call(asyncio.sleep, 30, limit_s=0.1)
    assert str(hanging.value) == "the tool took longer than 0.1 s"
    assert str(stopped.value) == "the tool took longer than 0.1 s and was stopped"


def test_hanging_calls_are_counted_until_they_end(release):
    assert until(lambda: hung_calls() == 0)
    for _ in range(3):
        with pytest.raises(RolloutError):
            call(release.wait, 30, limit_s=0.1)
    assert hung_calls() == 3
    release.set()
    assert until(lambda: hung_calls() == 0)


def test_too_many_hanging_calls_are_our_failure_and_not_an_exception_that_a_tool_might_raise(release, monkeypatch):
    monkeypatch.setattr(calls, "MAX_HUNG_CALLS", 1)
    with pytest.raises(RolloutError):
        call(release.wait, 30, limit_s=0.1)
    with pytest.raises(OutOfThreads, match=r"2 calls of tools, measures .* ran past their time limit"):
        call(release.wait, 30, limit_s=0.1)
    assert not issubclass(OutOfThreads, Exception)


def test_a_thread_that_does_not_start_is_our_failure(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    async def no_thread_left():
        monkeypatch.setattr(calls, "_idle_workers", [])
        monkeypatch.setattr(threading.Thread, "start", refuse)
        try:
            await called(print, limit_s=1)
        finally:
            monkeypatch.undo()

    with pytest.raises(OutOfThreads, match=r"no thread could be started .*: can't start new thread"):
        asyncio.run(no_thread_left())


def test_a_forked_child_starts_threads_of_its_own():
    async def child():
        return await called(lambda: 42, limit_s=5)

    call(print)  # leaves an idle thread, which a fork does not copy
    if (pid := os.fork()) == 0:
        os._exit(0 if asyncio.run(child()) == 42 else 1)
    assert os.waitpid(pid, 0)[1] == 0


def in_lanes(lanes, fn, *args, limit_s=30.0):
    """The outcomes of a call in each lane, all at once."""

    async def one(lane):
        with in_lane(lane):
            return await called(fn, *args, limit_s=limit_s)

    async def all_of_them():
        return await asyncio.gather(*map(one, lanes), return_exceptions=True)

    return asyncio.run(all_of_them())


def test_all_calls_of_a_lane_run_in_one_thread_one_after_the_other_quick_or_slow():
    lanes, running = [Lane(), Lane()], []

    def slow():
        running.append(threading.get_ident())
        assert running.count(threading.get_ident()) == 1
        time.sleep(0.02)
        running.remove(threading.get_ident())
        return threading.get_ident()

    first = in_lanes(lanes, threading.get_ident)
    assert len(set(first)) == 2
    assert in_lanes(lanes * 3, slow) == first * 3
    assert in_lanes(lanes, threading.get_ident) == first
    for lane in lanes:
        lane.end()


def test_a_lane_is_a_thread_that_others_get_when_it_has_ended(release):
    def of(lane):
        return in_lanes([lane], threading.get_ident)[0]

    lane, closed = Lane(), []
    ident = of(lane)
    lane.end(lambda: closed.append(threading.get_ident()))
    assert until(lambda: closed == [ident])
    assert until(lambda: not calls._ending)
    again = [Lane() for _ in range(len(calls._idle_workers))]
    assert ident in [of(lane) for lane in again]
    for lane in again:
        lane.end()


def test_calls_in_lanes_run_at_once_and_do_not_stop_the_event_loop(release):
    all_run = threading.Barrier(50)
    lanes = [Lane() for _ in range(50)]
    assert sorted(in_lanes(lanes, all_run.wait, 60)) == list(range(50))
    for lane in lanes:
        lane.end()


def test_the_limit_of_a_call_in_a_lane_begins_when_it_begins():
    lane = Lane()
    assert in_lanes([lane] * 4, time.sleep, 0.3, limit_s=1.0) == [None] * 4
    lane.end()


def test_a_lane_whose_call_hangs_fails_its_attempt_and_closes_it_when_the_call_ends(release):
    assert until(lambda: hung_calls() == 0)
    lane, closed = Lane(), []
    hung, waiting = in_lanes([lane, lane], release.wait, 30, limit_s=0.1)
    assert (type(hung), str(hung)) == (AttemptStuck, "the tool took longer than 0.1 s")
    assert type(waiting) is AttemptStuck
    [later] = in_lanes([lane], print)
    assert type(later) is AttemptStuck
    assert "still runs" in str(later)
    assert hung_calls() == 1
    lane.end(lambda: closed.append("closed"))
    assert closed == []
    release.set()
    assert until(lambda: closed == ["closed"])
    assert until(lambda: hung_calls() == 0)


def test_hundreds_of_blocking_calls_run_at_once():
    all_run = threading.Barrier(200)

    async def all_of_them():
        return await asyncio.gather(*(called(all_run.wait, 60, limit_s=120) for _ in range(200)))

    assert sorted(asyncio.run(all_of_them())) == list(range(200))


def test_a_thread_that_ends_after_its_loop_closed_says_nothing(capsys):
    release, ended = threading.Event(), threading.Event()

    def late():
        release.wait(10)
        ended.set()

    with pytest.raises(RolloutError):
        call(late, limit_s=0.1)
    release.set()
    assert ended.wait(5)
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


class Panic(BaseException):
    """As those of Rust extensions."""


def raising(error):
    def raises():
        raise error

    async def raises_slowly():
        await asyncio.sleep(0)
        raise error

    return raises, raises_slowly


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [Panic("a"), SystemExit(0), GeneratorExit(), asyncio.CancelledError()], ids=repr)
def test_what_is_no_exception_is_raised_as_one_with_the_same_text(error, is_async):
    with pytest.raises(RolloutError) as raised:
        call(raising(error)[is_async])
    assert isinstance(raised.value.__cause__, UserCodeExit)
    assert raised.value.__cause__.__cause__ is error
    assert str(raised.value) == f"the tool raised {text_of(error)}"


def test_async_code_cancels_only_its_own_task():
    async def cancels():
        asyncio.current_task().cancel()
        await asyncio.sleep(30)

    async def main():
        with pytest.raises(RolloutError):
            await called(cancels, limit_s=30)
        return asyncio.current_task().cancelling()

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("waits", [asyncio.Event().wait, lambda: threading.Event().wait(2)])
def test_the_cancellation_of_the_caller_is_none_of_the_code(waits):
    async def main():
        task = asyncio.create_task(called(waits, limit_s=30))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())


def test_what_a_signal_handler_raises_is_not_the_failure_of_the_code_that_it_interrupts():
    def ring(number, frame):
        raise Panic("time is up")

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(Panic), user_code():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def named(monkeypatch):
    """The names of async code that blocks the event loop for 0.05 s."""
    names = []
    monkeypatch.setattr(time_limit, "BLOCKED_S", 0.05)
    monkeypatch.setattr(time_limit.log, "warning", lambda text, *values: names.append(values[0].rpartition(".")[2]))
    return names


def test_async_code_that_blocks_the_event_loop_is_named(named):
    async def look_up():
        while not named:
            time.sleep(0.01)

    asyncio.run(called(look_up, limit_s=30))
    assert named == ["look_up"]


def sleep_for_ever():
    time.sleep(10**6)


def loop_for_ever():
    while True:
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="no signal ends a waiting call")
@pytest.mark.parametrize("block", [sleep_for_ever, loop_for_ever, lambda: threading.Event().wait()])
@pytest.mark.parametrize("in_task_of_its_own", [False, True])
def test_async_code_that_blocks_the_event_loop_for_ever_is_stopped(named, block, in_task_of_its_own):
    async def blocks():
        await asyncio.sleep(0)
        block()

    async def look_up():
        await (asyncio.wait_for(asyncio.create_task(blocks()), 1000) if in_task_of_its_own else blocks())

    async def main():
        for _ in range(2):
            with pytest.raises(RolloutError, match=r"blocked the event loop for more than 0.1 s and was stopped"):
                await called(look_up, limit_s=0.1)
        return await called(asyncio.sleep, 0.2, "still works", limit_s=5)

    assert asyncio.run(main()) == "still works"
    assert named == ["blocks" if in_task_of_its_own else "look_up"] * 2


def test_our_own_work_on_the_event_loop_is_not_stopped(named):
    """Such as a step of the engine, which a judge's request may have started."""

    async def main():
        exec(compile("async def drive(sleep): sleep(0.5)", "drive", "exec"), names := {"__name__": "palestra.policy"})

        async def judge():
            asyncio.get_running_loop().create_task(names["drive"](time.sleep))
            await asyncio.sleep(0.05)

        await called(judge, limit_s=0.1)

    with pytest.raises(RolloutError, match="took longer than"):
        asyncio.run(main())
    assert named == []


@pytest.mark.skipif(sys.platform == "win32", reason="no signal ends a waiting call")
@pytest.mark.parametrize("block", [sleep_for_ever, loop_for_ever])
def test_a_time_limit_in_the_main_thread_ends_waiting_and_computing(block):
    with pytest.raises(time_limit.TimeLimitError, match="longer than its time limit"), time_limit.time_limit(0.1):
        block()
    time.sleep(0.2)  # nothing comes later
