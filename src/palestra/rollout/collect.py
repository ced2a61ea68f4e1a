"""Groups of sibling attempts that run together; their episodes open within a time limit, all or none."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.core.calls import OutOfThreads
from palestra.core.chat_model import hosting, logging_calls
from palestra.core.errors import NotFiniteError, PalestraError, ResourceError, TrainingError, UserCodeError
from palestra.core.types import Group, Problem, Rollout
from palestra.envs.base import Environment, Episode
from palestra.envs.running import NotOpened, Opener, RunningEnv, close_episodes, close_now
from palestra.evals.rollout_stats import length_metrics
from palestra.rollout.agent_loop import NOT_FINITE, AttemptLimits, Speaker, run_attempt, wrap_user_error
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import RewardFunctions

OnRollout = Callable[[Rollout], None]
# Groups start in batches, so that the GPU can begin decoding while the remaining prompts are rendered.
START_BATCH_ROLLOUTS = 128
YIELDS_PER_BATCH = 4  # of the event loop: the first of them are being sampled then


@dataclass(slots=True)
class Started:
    """A group whose attempts can begin, unless it has an error; nothing is sampled yet. `state` is the runner's."""

    problem: Problem
    episodes: list[Episode]
    error: str | None = None
    state: Any = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # for reward functions, besides the problem's


class Runner:
    """Makes the rollouts of a group: our agent loop, a user's function, a program. The collector does all the rest."""

    in_batches = False  # whether `begin` gets all groups that may be open, before any is attempted
    runs_programs = False  # whose number it limits itself, and none of which outlives the step
    # Called, if there is one, for the groups that were opened together; it may give them errors.
    begin: Callable[[Sequence[Started]], Awaitable[None]] | None = None
    # Metrics of a group that was attempted, if there are any.
    metrics: Callable[[Started, Group], Mapping[str, Any]] | None = None

    async def open(self, opener: Opener, problem: Problem, count: int) -> list[Episode] | NotOpened:
        return await opener.open(problem, count)

    def start(self, group: Started) -> None:
        """Called before the attempts of each group; a PalestraError fails the group."""

    async def attempt(self, group: Started, i: int, seed_key: str) -> Rollout:
        """The attempt of sibling i, with the scores of its episode. What fails it is recorded on the rollout."""
        raise NotImplementedError

    def close(self, group: Started) -> None:
        """Free what `start` has taken, whether or not there were attempts."""


@dataclass(frozen=True, slots=True)
class AgentLoop(Runner):
    """Our agent loop. `speakers` gives each sibling of a group its speaker."""

    limits: AttemptLimits
    speakers: Callable[[Sequence[Episode]], list[Speaker]]

    def start(self, group: Started) -> None:
        if group.state is None:
            group.state = dict(enumerate(self.speakers(group.episodes)))

    async def attempt(self, group: Started, i: int, seed_key: str) -> Rollout:
        speaker = group.state.pop(i)
        return await run_attempt(speaker, group.episodes[i], group.problem, self.limits, seed_of(seed_key))

    def close(self, group: Started) -> None:
        for speaker in group.state.values():
            speaker.close()


@dataclass(frozen=True, slots=True)
class Collector:
    """Problems -> groups of scored attempts by a runner in this process."""

    environment: Environment
    runner: Runner
    rewards: RewardFunctions = field(default_factory=RewardFunctions)
    max_open_episodes: int = 1024
    host: LocalModels = field(default_factory=LocalModels)  # of models that help in rollouts
    _opener: Opener = field(init=False, repr=False, compare=False)
    _prepared: list[Started] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.environment, RunningEnv) and isinstance(self.runner, AgentLoop):
            self.environment.max_text_chars = self.runner.limits.max_tool_result_chars
        object.__setattr__(self, "_opener", Opener(self.environment))

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
        on_group: Callable[[int, Group], None] | None = None,
    ) -> list[Group]:
        """One group per problem, in this order. Equal seed keys give equal rollouts.

        `on_group` gets the number of each problem and its group when that is complete.
        """
        at_once = len(problems) if self.runner.runs_programs else self.groups_at_once(group_size)
        if self.runner.in_batches and len(problems) > at_once:
            parts = [slice(i, i + at_once) for i in range(0, len(problems), at_once)]
            collected = [await self.collect(problems[p], group_size, seed_keys[p], on_rollout) for p in parts]
            return [group for groups in collected for group in groups]
        started = dict[int, Started]()
        for i, group in enumerate(self._prepared):
            asked = problems[i] if i < len(problems) and len(group.episodes) == group_size else None
            if asked is not None and (asked.id, asked.input) == (group.problem.id, group.problem.input):
                started[i] = group
            else:
                self._abandon(group)
        self._prepared.clear()
        opening: dict[int, asyncio.Task[Started]] = {}
        for i, problem in enumerate(problems[:at_once]):
            if i not in started:
                opening[i] = asyncio.create_task(self._open(problem, group_size))
        slots = asyncio.Semaphore(at_once)

        async def attempted(i: int, problem: Problem, key: str) -> Group:
            async with slots:
                if i not in started:
                    started[i] = await self._open(problem, group_size)
                group = await self._group(started.pop(i), group_size, key, on_rollout)
            if on_group is not None:
                on_group(i, group)
            return group

        tasks: list[asyncio.Task[Group]] = []
        try:
            if opening:  # before the first samples, so that the sampler's batches do not depend on which opened first
                await asyncio.wait(opening.values())
                started |= {i: task.result() for i, task in opening.items()}
                opening.clear()
            if self.runner.begin is not None:
                await self.runner.begin([group for group in started.values() if group.error is None])
            with hosting(self.host):
                batch = max(1, START_BATCH_ROLLOUTS // group_size)
                for i, (problem, key) in enumerate(zip(problems, seed_keys, strict=True)):
                    tasks.append(asyncio.create_task(attempted(i, problem, key)))
                    for _ in range(0 if (i + 1) % batch else YIELDS_PER_BATCH):
                        await asyncio.sleep(0)
            groups = list(await asyncio.gather(*tasks))
            self.rewards.require_working()
            return groups
        except OutOfThreads as error:
            raise UserCodeError(str(error)) from error
        finally:
            for task in tasks:
                task.cancel()
            if self.runner.runs_programs:
                await asyncio.gather(*tasks, return_exceptions=True)
            if started or opening:
                self._abandon(*started.values(), *opening.values())

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Open the next step's episodes early, unless that is slow: containers and servers are held only in use."""
        self.abandon()
        if not self._opener.is_quick or getattr(self.environment, "max_episodes", None) is not None:
            return
        problems = problems[: self.groups_at_once(group_size)]
        opening = [asyncio.create_task(self._open(problem, group_size)) for problem in problems]
        try:
            await asyncio.wait(opening)
            while opening and (group := opening[0].result()).error is None:  # else `collect` tries again, and says so
                self.runner.start(group)
                self._prepared.append(group)
                del opening[0]
        except PalestraError:  # a prompt that is refused, as it will be again
            return
        finally:
            self._abandon(*opening)

    def abandon(self) -> None:
        """Discard prepared groups that will not be collected."""
        self._abandon(*self._prepared)
        self._prepared.clear()

    async def _open(self, problem: Problem, group_size: int) -> Started:
        opened = await self.runner.open(self._opener, problem, group_size)
        return Started(problem, [], opened.reason) if isinstance(opened, NotOpened) else Started(problem, opened)

    def _abandon(self, *groups: Started | asyncio.Task[Started]) -> None:
        """Close groups that were not attempted. Waits neither for that nor for those that are still opening."""
        episodes: list[Episode] = []
        for group in groups:
            if isinstance(group, asyncio.Task):
                if group.cancel() or group.cancelled() or group.exception() is not None:
                    continue
                group = group.result()
            if group.state is not None:
                self.runner.close(group)
            episodes += group.episodes
        close_now(episodes)

    def groups_at_once(self, group_size: int) -> int:
        """Maximum number of groups in flight."""
        limit = getattr(self.environment, "max_episodes", None)
        if limit is not None and limit < group_size:
            raise ResourceError(
                f"the environment takes {limit} attempts at a time, and a group has {group_size}; "
                "let it take more, or lower rollout.group_size"
            )
        return max(1, min(limit or self.max_open_episodes, self.max_open_episodes) // group_size)

    async def _group(self, started: Started, size: int, seed_key: str, on_rollout: OnRollout) -> Group:
        """Attempt, score and reward the siblings, and close their episodes."""
        problem, episodes = started.problem, started.episodes

        async def attempt(i: int) -> Rollout:
            rollout = await self.runner.attempt(started, i, f"{seed_key}/{i}")
            on_rollout(rollout)
            return rollout

        try:
            if started.error is None:
                self.runner.start(started)
        except PalestraError as refused:  # a prompt that is too long, or refused by the template
            started.error = str(refused)
        if started.error is not None:
            prompt = tuple(episodes[0].prompt) if episodes else ()
            failed = Rollout(problem.id, (), prompt, "failed", error=started.error)
            await close_episodes(episodes)
            for _ in range(size):
                on_rollout(failed)
            return Group(problem.id, (failed,) * size)
        with logging_calls() as calls:
            tasks = [asyncio.create_task(attempt(i)) for i in range(size)]
            try:
                rollouts = await scored_together(self.environment, episodes, await asyncio.gather(*tasks))
                weights, columns = self.environment.reward_weights, started.columns
                group = await self.rewards.reward(problem, rollouts, episodes, weights, columns)
                lengths = length_metrics(group.rollouts, calls.judges) if calls.judges else {}
                metrics = {**group.metrics, **calls.counts, **lengths}
                if self.runner.metrics is not None:
                    metrics.update(self.runner.metrics(started, group))
                return replace(group, metrics=metrics)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.runner.close(started)
                this = asyncio.current_task()
                if this is not None and this.cancelling():  # Ctrl-C does not wait for a slow close
                    close_now(episodes)
                else:
                    await close_episodes(episodes)


@dataclass(frozen=True, slots=True)
class RemoteCollector:
    """Groups made elsewhere, for training or for evaluations: by worker processes, ranks, or actors of a cluster.

    `open_groups` is how many groups of a size each of them may have open.
    """

    remote: Any  # RolloutWorkers, RolloutRanks, or the RolloutPool of `backend: ray`
    training: bool
    open_groups: Callable[[int], int]

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
    ) -> list[Group]:
        at_once = self.open_groups(group_size)
        return await self.remote.collect(self.training, problems, group_size, seed_keys, at_once, on_rollout)

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        await self.remote.prepare(problems, group_size)

    def abandon(self) -> None:
        self.remote.abandon()

    def groups_at_once(self, group_size: int) -> int:
        return self.open_groups(group_size) * len(self.remote)


GroupCollector = Collector | RemoteCollector


async def scored_together(
    environment: Environment, episodes: Sequence[Episode], rollouts: Sequence[Rollout]
) -> Sequence[Rollout]:
    """Apply the environment's group scores, if it defines any; failed rollouts are left out."""
    good = [i for i, rollout in enumerate(rollouts) if rollout.error is None]
    if not (score_group := getattr(environment, "score_group", None)) or not good:
        return rollouts
    scored = list(rollouts)
    try:
        group_scores = await wrap_user_error("score_group", score_group([episodes[i] for i in good]))
    except PalestraError as failure:
        for i in good:
            scored[i] = replace(rollouts[i], stop="failed", error=str(failure))
        return scored
    for i, verdicts in zip(good, group_scores or (), strict=group_scores is not None):
        scored[i] = replace(rollouts[i], scores={**rollouts[i].scores, **verdicts})
    return scored


def any_good(groups: Sequence[Group]) -> bool:
    """Whether at least one attempt did not fail; also true of no attempts."""
    errors = [r.error for group in groups for r in group.rollouts]
    return not errors or None in errors


def require_one_good(groups: Sequence[Group]) -> None:
    """Raise if every attempt failed: there is nothing to learn or to report."""
    first: str | None = None
    for group in groups:
        for rollout in group.rollouts:
            if rollout.error is None:
                return
            first = first or rollout.error
    if first is not None:
        kind = NotFiniteError if NOT_FINITE in first else TrainingError
        raise kind(f"every rollout failed; the first error was {first}")


def seed_of(key: str) -> int:
    """A seed that depends on the key alone, so that a resumed run samples what the first would have."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
