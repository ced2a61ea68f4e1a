import asyncio
import threading
import time

import pytest

from palestra.core.calls import CallTimeout, call_with_limit


def call(fn, *args, timeout_s=5.0, **kwargs):
    return asyncio.run(call_with_limit(fn, *args, timeout_s=timeout_s, **kwargs))


def test_a_sync_function_runs_outside_of_the_event_loop_thread():
    assert call(threading.get_ident) != threading.get_ident()


def test_an_async_function_runs_on_the_event_loop():
    async def where():
        return threading.get_ident()

    assert call(where) == threading.get_ident()


def test_a_sync_function_that_gives_a_coroutine_is_awaited():
    async def answer():
        return 42

    assert call(lambda: answer()) == 42


def test_a_hanging_sync_function_times_out():
    release = threading.Event()
    started = time.perf_counter()
    with pytest.raises(CallTimeout, match=r"longer than 0\.05 s"):
        call(release.wait, 30, timeout_s=0.05)
    assert time.perf_counter() - started < 5
    release.set()


def test_a_hanging_async_function_times_out():
    with pytest.raises(CallTimeout):
        call(asyncio.sleep, 30, timeout_s=0.05)


def test_a_timeout_error_of_the_function_itself_is_not_taken_for_ours():
    def fails():
        raise TimeoutError("the database is slow")

    with pytest.raises(TimeoutError, match="database"):
        call(fails)


def test_hundreds_of_blocking_calls_run_at_once():
    async def all_of_them():
        await asyncio.gather(*(call_with_limit(time.sleep, 0.2, timeout_s=10) for _ in range(200)))

    started = time.perf_counter()
    asyncio.run(all_of_them())
    assert time.perf_counter() - started < 10  # one after the other would take 40 s


def test_a_thread_that_ends_after_its_loop_closed_says_nothing(capsys):
    release, ended = threading.Event(), threading.Event()

    def late():
        release.wait(10)
        ended.set()

    with pytest.raises(CallTimeout):
        call(late, timeout_s=0.01)
    release.set()
    assert ended.wait(5)
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
