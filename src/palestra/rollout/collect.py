"""Groups of sibling attempts that run together; their episodes open within a time limit, all or none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from palestra.core.calls import OutOfThreads
from palestra.core.chat_model import CallLog, ModelHost, hosting, logging_calls
from palestra.core.errors import (
    NotFiniteError,
    PalestraError,
    ResourceError,
    TrainingError,
    UserCodeError,
)
from palestra.core.types import Group, Message, Problem, Rollout
from palestra.envs.base import Environment, Episode, ScoresGroups
from palestra.envs.running import NotOpened, Opener, RunningEnv, abandon, close_episodes, close_now
from palestra.evals.rollout_stats import length_metrics
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
