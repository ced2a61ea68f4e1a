"""Opening and closing episodes: user code that may start a program or call a server for each."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from palestra.agents.tools.tool import Tool
from palestra.core.calls import call_with_limit, calls_with_limit, user_code
from palestra.core.errors import CallTimeout, ServiceError, text_of
from palestra.core.types import Problem
from palestra.envs.base import Environment, Episode

OPEN_LIMIT_S = 300.0  # an environment may start a container
CLOSE_LIMIT_S = 60.0
QUICK_S, SLOW_S = 0.001, 0.02

log = logging.getLogger("palestra")


class OpenTimeout(ServiceError):
    """An environment does not open an episode in time."""


@dataclass(frozen=True, slots=True)
class NotOpened:
    """Reason the episodes of a problem failed to open."""

    reason: str


class Opener:
    """Opens the episodes of one environment, which may start a program or call a server for each: in a thread each, or
    one after the other in one thread, where the last ones took less time than it takes to hand a thread a call.

    Judged by the median: on a busy machine a quick one takes a few milliseconds now and then.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.is_quick = False

    async def open(self, problem: Problem, count: int, limit_s: float = OPEN_LIMIT_S) -> list[Episode] | NotOpened:
        """Open all episodes, or close any that opened and return the reason."""
        episodes: list[Episode] = []
        seconds: list[float] = []  # that each took
        lock, abandoned = threading.Lock(), threading.Event()

        def open_one() -> None:
            began = time.perf_counter()
            episode = self._environment.open(problem)
            seconds.append(time.perf_counter() - began)
            with lock:
                if not abandoned.is_set():
                    episodes.append(episode)
                    return
            episode.close()

        def open_while_quick() -> None:
            """Open episodes; return early if one is slow."""
            while len(episodes) < count and not abandoned.is_set():
                open_one()
                if seconds[-1] >= QUICK_S:
                    return

        try:
            if self.is_quick:
                await call_with_limit(open_while_quick, timeout_s=limit_s)
            await calls_with_limit([open_one] * (count - len(episodes)), timeout_s=limit_s)
        except BaseException as error:  # also Ctrl-C: threads cannot be ended; what they open from now on is closed
            with lock:
                abandoned.set()
            close_now(episodes)
            if not isinstance(error, Exception):
                raise
            return NotOpened(text_of(error, "opening an episode"))
        self.is_quick = median(seconds) < QUICK_S and max(seconds) < SLOW_S
        return episodes


async def close_episodes(episodes: Sequence[Episode]) -> None:
    """In a thread: closing may end a program, or wait for a server. One that takes long costs no attempt."""
    try:
        await call_with_limit(close_now, episodes, timeout_s=CLOSE_LIMIT_S)
    except CallTimeout as error:
        log.warning("closing the %d episodes of a group %s; it continues in the background", len(episodes), error)


def close_now(episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        episode.close()


def tools_of(environment: Environment, problem: Problem) -> list[Tool]:
    """The tools of a problem's episode, which is opened and closed in a thread, within OPEN_LIMIT_S.

    Raises what opening it raises, and PalestraError when that takes too long. For use before a run, without event loop.
    """
    outcome: queue.SimpleQueue[list[Tool] | BaseException] = queue.SimpleQueue()

    def look() -> None:
        try:
            with user_code():
                episode = environment.open(problem)
                tools = list(episode.tools)
                episode.close()
            outcome.put(tools)
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=look, name="palestra-first-episode", daemon=True).start()
    try:
        result = outcome.get(timeout=OPEN_LIMIT_S)
    except queue.Empty:
        raise OpenTimeout(
            f"the environment's first episode did not open within {OPEN_LIMIT_S:g} s; "
            "check that the servers and containers it needs are running"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result
