"""Episodes open within a limit, all or none; none stays open; closing does not hold up the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from palestra.core.types import Problem
from palestra.rollout.opening import NotOpened, abandon, close_episodes, open_episodes

PROBLEM = Problem("1", "Go.")


class Doors:
    """An environment whose episodes open when `go` is set, the first `quick` of them at once."""

    def __init__(self, quick: int = 0) -> None:
        self.go = threading.Event()
        self.quick, self.opened, self.closed = quick, 0, 0

    def open(self, problem: Problem) -> SimpleNamespace:
        self.opened += 1
        if self.opened > self.quick:
            assert self.go.wait(10)
        return SimpleNamespace(close=self.close)

    def close(self) -> None:
        self.closed += 1
        self.thread = threading.current_thread()

    def wait_until_closed(self, count: int) -> None:
        until = time.monotonic() + 5
        while self.closed < count and time.monotonic() < until:
            time.sleep(0.005)
        assert self.closed == count


def test_an_episode_that_does_not_open_is_given_up_after_the_limit_and_closed_when_it_opens() -> None:
    doors = Doors(quick=1)
    opened = asyncio.run(open_episodes(doors, PROBLEM, 2, limit_s=1.0))
    assert isinstance(opened, NotOpened)
    assert opened.reason == "opening an episode took longer than 1 s"
    assert doors.closed == 1
    doors.go.set()
    doors.wait_until_closed(2)


def test_what_is_still_being_opened_at_ctrl_c_is_closed() -> None:
    doors = Doors(quick=1)

    async def interrupted() -> None:
        task = asyncio.create_task(open_episodes(doors, PROBLEM, 2))
        while doors.opened < 2:
            await asyncio.sleep(0.005)
        abandon([task])
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    doors.go.set()
    doors.wait_until_closed(2)


def test_episodes_that_nobody_has_taken_are_closed() -> None:
    doors = Doors(quick=2)

    async def not_taken() -> None:
        task = asyncio.create_task(open_episodes(doors, PROBLEM, 2))
        await asyncio.wait([task])
        abandon([task])

    asyncio.run(not_taken())
    assert doors.closed == 2


def test_episodes_are_closed_in_a_thread() -> None:
    doors = Doors(quick=2)

    async def both() -> None:
        episodes = await open_episodes(doors, PROBLEM, 2)
        assert isinstance(episodes, list)
        await close_episodes(episodes)

    asyncio.run(both())
    assert doors.closed == 2
    assert doors.thread is not threading.main_thread()
