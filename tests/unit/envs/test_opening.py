"""Episodes open within a limit, all or none; none stays open; closing does not hold up the event loop."""

import asyncio
import random
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from builders import wait_until

from palestra.agents.tools.run import run_calls
from palestra.core import calls as calls_module
from palestra.core.calls import in_lane
from palestra.core.types import Problem, ToolCall
from palestra.envs import running as opening
from palestra.envs.base import Episode
from palestra.envs.env import Env
from palestra.envs.running import PROBATION, NotOpened, Opener, RunningEnv, close_episodes
from palestra.rollout.collect import Collector, Runner

PROBLEM = Problem("1", "Go.")


class Doors:
    """An environment whose episodes open when `go` is set, the first `quick` of them at once."""

    def __init__(self, quick: int = 0) -> None:
        self.go = threading.Event()
        self.quick, self.opened, self.closed = quick, 0, 0
        self.threads: list[threading.Thread] = []  # that opened them

    def open(self, problem: Problem) -> SimpleNamespace:
        self.opened += 1
        self.threads.append(threading.current_thread())
        if self.opened > self.quick:
            assert self.go.wait(10)
        return SimpleNamespace(close=self.close)

    def close(self) -> None:
        self.closed += 1
        self.thread = threading.current_thread()

    def wait_until_closed(self, count: int) -> None:
        wait_until(lambda: self.closed >= count)
        assert self.closed == count

    async def wait_until_opened(self, count: int) -> None:
        while self.opened < count:
            await asyncio.sleep(0.005)


def test_an_episode_that_does_not_open_is_given_up_after_the_limit_and_closed_when_it_opens() -> None:
    doors = Doors(quick=1)
    opened = asyncio.run(Opener(doors).open(PROBLEM, 2, limit_s=1.0))
    assert isinstance(opened, NotOpened)
    assert opened.reason == "opening an episode took longer than 1 s"
    assert doors.closed == 1
    doors.go.set()
    doors.wait_until_closed(2)


def test_what_is_still_being_opened_at_ctrl_c_is_closed() -> None:
    doors = Doors(quick=1)

    async def interrupted() -> None:
        collector = Collector(doors, Runner())
        task = asyncio.create_task(collector._open(PROBLEM, 2))
        await doors.wait_until_opened(2)
        collector._abandon(task)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    doors.go.set()
    doors.wait_until_closed(2)


def test_episodes_are_closed_also_where_nobody_has_taken_them_and_in_a_thread() -> None:
    doors = Doors(quick=4)

    async def both() -> None:
        collector = Collector(doors, Runner())
        task = asyncio.create_task(collector._open(PROBLEM, 2))
        await asyncio.wait([task])
        collector._abandon(task)
        doors.wait_until_closed(2)
        episodes = await Opener(doors).open(PROBLEM, 2)
        assert isinstance(episodes, list)
        await close_episodes(episodes)

    asyncio.run(both())
    assert doors.closed == 4
    assert doors.thread is not threading.main_thread()


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is quick may take a while."""
    monkeypatch.setattr(opening, "QUICK_S", 5.0)
    monkeypatch.setattr(opening, "SLOW_S", 5.0)


@pytest.mark.usefixtures("slow_machine")
def test_where_episodes_open_at_once_those_of_a_group_are_opened_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    doors = Doors(quick=32)
    opener = Opener(doors)
    calls: list[int] = []
    add = calls_module._CallQueue.add
    monkeypatch.setattr(calls_module._CallQueue, "add", lambda *args: calls.append(doors.opened) or add(*args))

    async def groups() -> None:
        for _ in range(4):
            episodes = await opener.open(PROBLEM, 8)
            assert isinstance(episodes, list)
            assert len(episodes) == 8

    asyncio.run(groups())
    assert calls == [0] * 8 + [8, 16, 24]


def test_where_an_episode_takes_long_the_others_of_its_group_do_not_wait_for_one_another() -> None:
    doors = Doors(quick=11)  # the fourth of the second group waits
    opener = Opener(doors)

    async def both() -> list[Episode] | NotOpened:
        await opener.open(PROBLEM, 8)
        task = asyncio.create_task(opener.open(PROBLEM, 8))
        await doors.wait_until_opened(12)
        await asyncio.sleep(2 * opening.SLOW_S)
        doors.go.set()
        await task
        doors.go.clear()
        task = asyncio.create_task(opener.open(PROBLEM, 8))
        await doors.wait_until_opened(24)  # all of the third are being opened together
        assert len(set(doors.threads[16:])) == 8
        doors.go.set()
        return await task

    episodes = asyncio.run(asyncio.wait_for(both(), 10))
    assert isinstance(episodes, list)
    assert len(episodes) == 8


@pytest.mark.usefixtures("slow_machine")
def test_a_group_that_is_given_up_while_it_is_opened_in_one_thread_leaves_nothing_open() -> None:
    doors = Doors(quick=10)
    opener = Opener(doors)

    async def given_up() -> None:
        await opener.open(PROBLEM, 8)
        found = await opener.open(PROBLEM, 8, limit_s=0.2)
        assert isinstance(found, NotOpened)

    asyncio.run(given_up())
    assert doors.closed == 2
    doors.go.set()
    doors.wait_until_closed(3)
    assert doors.opened == 11


class FirstEpisode(Doors):
    def open(self, problem: Problem) -> SimpleNamespace:
        return SimpleNamespace(close=super().open(problem).close, tools=["a tool"])


def test_a_first_episode_that_hangs_ends_the_start_with_an_error(monkeypatch) -> None:
    doors = FirstEpisode()
    monkeypatch.setattr(opening, "OPEN_LIMIT_S", 0.05)
    with pytest.raises(opening.OpenTimeout):
        opening.tools_of(doors, PROBLEM)
    doors.go.set()
    doors.wait_until_closed(1)


def test_the_tools_of_a_first_episode_are_known_when_it_is_closed_again() -> None:
    doors = FirstEpisode(quick=1)
    assert opening.tools_of(doors, PROBLEM) == ["a tool"]
    assert doors.closed == 1
    broken = SimpleNamespace(open=lambda problem: {}["no such key"])
    with pytest.raises(KeyError):
        opening.tools_of(broken, PROBLEM)


@pytest.mark.usefixtures("slow_machine")
def test_one_episode_that_a_busy_machine_delays_does_not_make_the_environment_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening, "QUICK_S", 0.2)
    doors = Doors(quick=16)
    opener = Opener(doors)
    opened, delays = doors.open, iter([0.3] + [0.0] * 7)

    def delayed(problem: Problem) -> Episode:
        time.sleep(next(delays))
        return opened(problem)

    monkeypatch.setattr(doors, "open", delayed)
    asyncio.run(opener.open(PROBLEM, 8))
    assert opener.is_quick


def test_episodes_that_close_slowly_cost_no_attempt(monkeypatch, caplog) -> None:
    monkeypatch.setattr(opening, "CLOSE_LIMIT_S", 0.02)
    release = threading.Event()
    asyncio.run(close_episodes([SimpleNamespace(close=release.wait)]))
    release.set()
    assert "took longer than 0.02 s" in caplog.text


class WithTool(Env):
    """An environment with a tool; some of its attempts keep something."""

    keeps: ClassVar[bool] = False

    def make_problem(self, rng: random.Random) -> str:
        return str(rng.random())

    def look(self) -> str:
        """Look."""
        if self.keeps:
            self.seen = object()
        return "a"

    def score(self, answer: str) -> float:
        return 0.0


async def lanes_of(environment: RunningEnv, count: int, *, calls_tool: bool = True) -> list[bool]:
    """Whether each of some attempts has a lane. They run one after the other."""
    lanes = []
    for _ in range(count):
        [episode] = await Opener(environment).open(Problem("1", "go"), 1)
        lanes.append(episode.lane is not None)
        with in_lane(episode.lane):
            tools, calls = {tool.name: tool for tool in episode.tools}, [ToolCall("1", "look", {})] * calls_tool
            await episode.score((), await run_calls(tools, calls, 10.0))
        await close_episodes([episode])
    return lanes


def test_attempts_have_no_lane_after_enough_of_them_kept_nothing() -> None:
    environment = RunningEnv(WithTool())
    assert asyncio.run(lanes_of(environment, PROBATION + 2)) == [True] * PROBATION + [False] * 2


def test_attempts_have_lanes_again_after_one_that_kept_something(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = RunningEnv(WithTool())
    asyncio.run(lanes_of(environment, PROBATION))
    monkeypatch.setattr(WithTool, "keeps", True)
    assert asyncio.run(lanes_of(environment, 2)) == [False, True]
    monkeypatch.setattr(WithTool, "keeps", False)
    assert all(asyncio.run(lanes_of(environment, PROBATION + 2)))


def test_attempts_that_called_no_tool_prove_nothing() -> None:
    environment = RunningEnv(WithTool())
    assert all(asyncio.run(lanes_of(environment, PROBATION + 2, calls_tool=False)))
