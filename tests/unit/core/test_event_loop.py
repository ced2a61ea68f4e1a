"""Blocking work inside of a running event loop, as in a notebook."""

import asyncio
import signal
import time

import pytest

from palestra.core.time_limit import outside_event_loop


def inside_a_loop(work):
    async def cell():
        result = outside_event_loop(work)
        await asyncio.sleep(0)  # the loop around it goes on as if nothing had been
        assert asyncio.current_task() is not None
        return result

    return asyncio.run(cell())


def test_work_with_a_loop_of_its_own_runs_inside_of_a_running_one():
    async def answer():
        await asyncio.sleep(0)
        return 42

    assert inside_a_loop(lambda: asyncio.run(answer())) == 42
    assert outside_event_loop(lambda: asyncio.run(answer())) == 42
    with pytest.raises(ZeroDivisionError):
        inside_a_loop(lambda: 1 / 0)


def test_ctrl_c_stops_the_work_while_it_waits_in_its_loop():
    async def trains():
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(300)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        inside_a_loop(lambda: asyncio.run(trains()))
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_stops_the_work_while_it_computes():
    with pytest.raises(KeyboardInterrupt):
        inside_a_loop(lambda: signal.raise_signal(signal.SIGINT) or time.sleep(30))
