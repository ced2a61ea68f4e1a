"""Steps wait a moment for quick tools, and for slow ones only once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from palestra.engine.session import Session
from palestra.policy import local
from palestra.policy.local import ToolBarrier


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The barrier's clock, which stands still unless a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(local, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def waits(barrier: ToolBarrier) -> bool:
    """Whether a step would wait for a session whose tool runs."""

    async def step() -> bool:
        barrier.turn_ended(Session([1]))
        began = asyncio.get_running_loop().time()
        await barrier.wait()
        return asyncio.get_running_loop().time() - began >= 0.009

    return asyncio.run(step())


def run_tool(barrier: ToolBarrier, clock: SimpleNamespace, seconds: float, sessions: int = 1) -> None:
    """Between two steps, for so many sessions at once."""
    away = [Session([1]) for _ in range(sessions)]
    for session in away:
        barrier.turn_ended(session)
    clock.now += seconds
    for session in away:
        barrier.came_back(session)
    asyncio.run(barrier.wait())


@pytest.mark.serial
def test_a_busy_moment_does_not_make_a_quick_tool_a_slow_one(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier(quick_s=0.05, patience_s=0.01)
    for seconds in (0.5, *[0.001] * 5, 0.9, 0.9):
        run_tool(barrier, clock, seconds)
    assert waits(barrier)


@pytest.mark.serial
def test_a_pause_of_the_machine_counts_once_however_many_were_away(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier(quick_s=0.05, patience_s=0.01)
    run_tool(barrier, clock, 0.5, sessions=64)
    assert waits(barrier)


@pytest.mark.serial
def test_a_slow_tool_holds_the_others_up_once_and_is_measured_on(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier(quick_s=0.05, patience_s=0.06)
    assert waits(barrier)
    assert not waits(barrier)
    for _ in range(8):
        run_tool(barrier, clock, 0.001)
    assert waits(barrier), "quick again"
    for _ in range(8):
        run_tool(barrier, clock, 0.2)
    assert not waits(barrier)


@pytest.mark.serial
def test_a_barrier_that_is_switched_off_never_waits(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier(enabled=False, quick_s=0.05, patience_s=0.06)
    for _ in range(8):
        run_tool(barrier, clock, 0.001)
    assert not waits(barrier)


@pytest.mark.serial
def test_nobody_waits_for_a_session_that_is_away() -> None:
    barrier = ToolBarrier(quick_s=10.0, patience_s=60.0)

    async def step() -> None:
        session = Session([1])
        barrier.turn_ended(session)
        asyncio.get_running_loop().call_soon(barrier.forget, session)
        await asyncio.wait_for(barrier.wait(), 5)

    asyncio.run(step())
