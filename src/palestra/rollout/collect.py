"""Groups of sibling attempts that run together; their episodes open within a time limit, all or none."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from palestra.agents.tools.tool import Tool
from palestra.core.calls import OutOfThreads, call_with_limit, calls_with_limit, user_code
from palestra.core.chat_model import CallLog, ModelHost, hosting, logging_calls
from palestra.core.errors import (
    CallTimeout,
    NotFiniteError,
    PalestraError,
    ResourceError,
    ServiceError,
    TrainingError,
    UserCodeError,
    text_of,
)
from palestra.core.types import Group, Message, Problem, Rollout
from palestra.envs.base import Environment, Episode, ScoresGroups
from palestra.envs.running import RunningEnv
from palestra.evals.judge_stats import length_metrics
from palestra.rollout.agent_loop import NOT_FINITE, AttemptLimits, Speaker, run_attempt, wrap_user_error
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import RewardFunctions

OnRollout = Callable[[Rollout], None]
# Groups start in batches, so that the GPU can begin decoding while the remaining prompts are rendered.
START_BATCH_ROLLOUTS = 128
YIELDS_PER_BATCH = 4  # of the event loop: the first of them are being sampled then


@dataclass(frozen=True, slots=True)
class Started:
    """A group whose conversations have begun; nothing is sampled yet."""

    problem: Problem
    episodes: Sequence[Episode]
    speakers: Sequence[Speaker]

    def abandon(self) -> None:
        for speaker in self.speakers:
            speaker.close()
        close_now(self.episodes)


@dataclass(frozen=True, slots=True)
class Collector:
    """Problems -> groups of scored attempts. `start` gives each sibling of a group its speaker."""

    environment: Environment
    limits: AttemptLimits
    start: Callable[[Sequence[Episode]], list[Speaker]]
    rewards: RewardFunctions = field(default_factory=RewardFunctions)
    max_open_episodes: int = 1024
    host: ModelHost = field(default_factory=LocalModels)  # of models that help in rollouts
    _opener: Opener = field(init=False, repr=False, compare=False)
    _prepared: list[Started] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.environment, RunningEnv):
            self.environment.max_text_chars = self.limits.max_tool_result_chars
        object.__setattr__(self, "_opener", Opener(self.environment))

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """Collect one group per problem; the number of open groups is limited. Equal seed keys give equal rollouts.

        `on_group` gets the number of each problem and its group when that is complete.
        """
        at_once = self.groups_at_once(group_size)
        started = dict[int, Started]()
        for i, group in enumerate(self._prepared):
            if i < len(problems) and group.problem is problems[i] and len(group.episodes) == group_size:
                started[i] = group
            else:
                group.abandon()
        self._prepared.clear()
        opening: dict[int, asyncio.Task[list[Episode] | NotOpened]] = {}
        for i, problem in enumerate(problems[:at_once]):
            if i not in started:
                opening[i] = asyncio.create_task(self._opener.open(problem, group_size))
        slots = asyncio.Semaphore(at_once)

        async def attempted(i: int, problem: Problem, key: str) -> Group:
            group: Group | None = None
            async with slots:
                if i not in started:
                    opened = await (opening[i] if i in opening else self._opener.open(problem, group_size))
                    opening.pop(i, None)  # from here on the group closes them
                    if isinstance(opened, NotOpened):
                        group = failed_group(problem, opened.reason, group_size, on_rollout)
                    else:
                        try:
                            started[i] = Started(problem, opened, self.start(opened))
                        except PalestraError as refused:  # a prompt that is too long, or refused by the template
                            await close_episodes(opened)
                            prompt = tuple(opened[0].prompt)
                            group = failed_group(problem, str(refused), group_size, on_rollout, prompt)
                group = group or await self._attempts(started.pop(i), key, on_rollout)
            if on_group is not None:
                on_group(i, group)
            return group

        tasks: list[asyncio.Task[Group]] = []
        try:
            if opening:  # before the first samples, so that the sampler's batches do not depend on which opened first
                await asyncio.wait(opening.values())
            with hosting(self.host):
                batch = max(1, START_BATCH_ROLLOUTS // group_size)
                for i, (problem, key) in enumerate(zip(problems, seed_keys, strict=True)):
                    tasks.append(asyncio.create_task(attempted(i, problem, key)))
                    for _ in range(0 if (i + 1) % batch else YIELDS_PER_BATCH):
                        await asyncio.sleep(0)
            return await all_groups(tasks, self.rewards)
        finally:
            for task in tasks:
                task.cancel()
            abandon(opening.values())
            for started_group in started.values():
                started_group.abandon()

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Open the next step's episodes early, unless that is slow: containers and servers are held only in use."""
        self.abandon()
        if not self._opener.is_quick or getattr(self.environment, "max_episodes", None) is not None:
            return
        problems = problems[: self.groups_at_once(group_size)]
        opening = [asyncio.create_task(self._opener.open(problem, group_size)) for problem in problems]
        try:
            await asyncio.wait(opening)
            for problem in problems:
                opened = opening[0].result()
                if isinstance(opened, NotOpened):
                    return  # `collect` will try again, and say so
                speakers = self.start(opened)
                self._prepared.append(Started(problem, opened, speakers))
                del opening[0]
        except PalestraError:  # a prompt that is refused, as it will be again
            return
        finally:
            abandon(opening)

    def abandon(self) -> None:
        while self._prepared:
            self._prepared.pop().abandon()

    def groups_at_once(self, group_size: int) -> int:
        """Maximum number of groups in flight."""
        limit = getattr(self.environment, "max_episodes", None)
        if limit is not None and limit < group_size:
            raise ResourceError(
                f"the environment takes {limit} attempts at a time, and a group has {group_size}; "
                "let it take more, or lower rollout.group_size"
            )
        return max(1, min(limit or self.max_open_episodes, self.max_open_episodes) // group_size)

    async def _attempts(self, group: Started, seed_key: str, on_rollout: OnRollout) -> Group:
        problem, episodes = group.problem, group.episodes

        async def attempt(i: int) -> Rollout:
            seed = seed_of(f"{seed_key}/{i}")
            rollout = await run_attempt(group.speakers[i], episodes[i], problem, self.limits, seed)
            on_rollout(rollout)
            return rollout

        with logging_calls() as calls:
            tasks = [asyncio.create_task(attempt(i)) for i in range(len(episodes))]
            try:
                rollouts = await scored_together(self.environment, episodes, await asyncio.gather(*tasks))
                rewarded = await self.rewards.reward(problem, rollouts, episodes, self.environment.reward_weights)
                return with_call_metrics(rewarded, calls)
            finally:
                for task in tasks:
                    task.cancel()
                await close_episodes(episodes)


async def scored_together(
    environment: Environment, episodes: Sequence[Episode], rollouts: Sequence[Rollout]
) -> Sequence[Rollout]:
    """Apply the environment's group scores, if it defines any; failed rollouts are left out."""
    good = [i for i, rollout in enumerate(rollouts) if rollout.error is None]
    if not isinstance(environment, ScoresGroups) or not good:
        return rollouts
    scored = list(rollouts)
    try:
        group_scores = await wrap_user_error("score_group", environment.score_group([episodes[i] for i in good]))
    except PalestraError as failure:
        for i in good:
            scored[i] = replace(rollouts[i], stop="failed", error=str(failure))
        return scored
    for i, verdicts in zip(good, group_scores or (), strict=group_scores is not None):
        scored[i] = replace(rollouts[i], scores={**rollouts[i].scores, **verdicts})
    return scored


def with_call_metrics(group: Group, calls: CallLog) -> Group:
    """Add the metrics of a group's judges and simulated users."""
    lengths = length_metrics(group.rollouts, calls.judges) if calls.judges else {}
    return replace(group, metrics={**group.metrics, **calls.counts, **lengths})


async def all_groups(tasks: Sequence[asyncio.Task[Group]], rewards: RewardFunctions) -> list[Group]:
    """Wait for all groups; if one fails, cancel the others. Raise if a reward function never worked."""
    try:
        groups = list(await asyncio.gather(*tasks))
        rewards.require_working()
        return groups
    except OutOfThreads as error:
        raise UserCodeError(str(error)) from error
    finally:
        for task in tasks:
            task.cancel()


def failed_group(
    problem: Problem, error: str, group_size: int, on_rollout: OnRollout, prompt: tuple[Message, ...] = ()
) -> Group:
    """The group of a problem that could not be attempted."""
    failed = Rollout(problem.id, (), prompt, "failed", error=error)
    for _ in range(group_size):
        on_rollout(failed)
    return Group(problem.id, (failed,) * group_size)


def any_good(groups: Sequence[Group]) -> bool:
    """Whether at least one attempt did not fail; also true of no attempts."""
    errors = [r.error for group in groups for r in group.rollouts]
    return not errors or None in errors


def require_one_good(groups: Sequence[Group]) -> None:
    """Raise if every attempt failed: there is nothing to learn or to report."""
    if not any_good(groups):
        first = next(r.error for group in groups for r in group.rollouts)
        kind = NotFiniteError if first and NOT_FINITE in first else TrainingError
        raise kind(f"every rollout failed; the first error was {first}")


def seed_of(key: str) -> int:
    """A seed that depends on the key alone, so that a resumed run samples what the first would have."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")


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


def abandon(opening: Iterable[asyncio.Task[list[Episode] | NotOpened]]) -> None:
    """Cancel episodes that are still opening, and close those that were not taken."""
    for task in opening:
        if not task.cancel() and not task.cancelled() and task.exception() is None:
            opened = task.result()
            close_now(opened if isinstance(opened, list) else [])


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
