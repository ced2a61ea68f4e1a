"""Groups of sibling attempts, running together."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.core.calls import OutOfThreads
from palestra.core.chat_model import CallLog, ModelHost, hosting, logging_calls
from palestra.core.errors import NotFiniteError, PalestraError, ResourceError, TrainingError, UserCodeError
from palestra.core.phases import phases
from palestra.core.types import Group, Message, Problem, Rollout, Turn
from palestra.envs.base import Environment, Episode, ScoresGroups
from palestra.envs.running import RunningEnv
from palestra.evals.judge_stats import length_metrics
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.toolcalls import UnexpectedCalls
from palestra.policy.base import Policy
from palestra.rollout.agent_loop import AttemptLimits, Speaker, from_outside, run_attempt
from palestra.rollout.local_models import LocalModels
from palestra.rollout.opening import NotOpened, Opener, abandon, close_episodes, close_now
from palestra.rollout.rewards import RewardFunctions
from palestra.rollout.speakers import NOT_FINITE, ChatEndpoint, EndpointSpeaker, TokenSpeaker

OnRollout = Callable[[Rollout], None]
BEGUN_AT_ONCE = 128  # rollouts
ROUNDS_BETWEEN = 4  # of the event loop: the first of them are being sampled then


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
        on_group: Callable[[int, Group], None] = lambda i, group: None,
    ) -> list[Group]:
        """Collect one group per problem; the number of open groups is limited. Equal seed keys give equal rollouts.

        `on_group` gets the number of each problem and its group when that is complete.
        """
        at_once = self.groups_at_once(group_size)
        started = self._take_prepared(problems, group_size)
        opening = {
            i: asyncio.create_task(self._opener.open(problem, group_size))
            for i, problem in enumerate(problems[:at_once])
            if i not in started
        }
        slots = asyncio.Semaphore(at_once)

        async def group_of(i: int, problem: Problem, key: str) -> Group:
            if i in started:
                return await self._attempts(started.pop(i), key, on_rollout)
            opened = await (opening[i] if i in opening else self._opener.open(problem, group_size))
            opening.pop(i, None)  # from here on the group closes them
            if isinstance(opened, NotOpened):
                return failed_group(problem, opened.reason, group_size, on_rollout)
            return await self._group(problem, opened, key, on_rollout)

        async def attempted(i: int, problem: Problem, key: str) -> Group:
            async with slots:
                group = await group_of(i, problem, key)
            on_group(i, group)
            return group

        try:
            if opening:  # before the first samples, so that the sampler's batches do not depend on which opened first
                await asyncio.wait(opening.values())
            attempts = (
                attempted(i, problem, key) for i, (problem, key) in enumerate(zip(problems, seed_keys, strict=True))
            )
            with hosting(self.host):
                tasks = await begun(attempts, at_once=max(1, BEGUN_AT_ONCE // group_size))
            return await all_groups(tasks, self.rewards)
        finally:
            abandon(opening.values())
            for group in started.values():
                group.abandon()

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

    def _take_prepared(self, problems: Sequence[Problem], group_size: int) -> dict[int, Started]:
        """What was prepared of these groups, by their number; the rest is given up."""
        prepared, self._prepared[:] = list(self._prepared), []
        found = dict[int, Started]()
        for i, group in enumerate(prepared):
            if i < len(problems) and group.problem is problems[i] and len(group.episodes) == group_size:
                found[i] = group
            else:
                group.abandon()
        return found

    def groups_at_once(self, group_size: int) -> int:
        """How many groups may be in progress together."""
        limit = getattr(self.environment, "max_episodes", None)
        if limit is not None and limit < group_size:
            raise ResourceError(
                f"the environment takes {limit} attempts at a time, and a group has {group_size}; "
                "let it take more, or lower rollout.group_size"
            )
        return max(1, min(limit or self.max_open_episodes, self.max_open_episodes) // group_size)

    async def _group(
        self, problem: Problem, episodes: Sequence[Episode], seed_key: str, on_rollout: OnRollout
    ) -> Group:
        try:
            speakers = self.start(episodes)
        except PalestraError as refused:  # a prompt that is too long, or that the chat template does not take
            await close_episodes(episodes)
            return failed_group(problem, str(refused), len(episodes), on_rollout, tuple(episodes[0].prompt))
        return await self._attempts(Started(problem, episodes, speakers), seed_key, on_rollout)

    async def _attempts(self, group: Started, seed_key: str, on_rollout: OnRollout) -> Group:
        problem, episodes = group.problem, group.episodes
        with logging_calls() as calls:
            tasks = [
                asyncio.create_task(self._one(problem, episode, speaker, seed_of(f"{seed_key}/{i}"), on_rollout))
                for i, (episode, speaker) in enumerate(zip(episodes, group.speakers, strict=True))
            ]
            try:
                rollouts = await scored_together(self.environment, episodes, await asyncio.gather(*tasks))
                rewarded = await self.rewards.reward(problem, rollouts, episodes, self.environment.reward_weights)
                return with_call_metrics(rewarded, calls)
            finally:
                for task in tasks:
                    task.cancel()
                await close_episodes(episodes)

    async def _one(
        self, problem: Problem, episode: Episode, speaker: Speaker, seed: int, on_rollout: OnRollout
    ) -> Rollout:
        rollout = await run_attempt(speaker, episode, problem, self.limits, seed)
        on_rollout(rollout)
        return rollout


async def scored_together(
    environment: Environment, episodes: Sequence[Episode], rollouts: Sequence[Rollout]
) -> Sequence[Rollout]:
    """Apply the environment's group scores, if it defines any; failed rollouts are left out."""
    good = [i for i, rollout in enumerate(rollouts) if rollout.error is None]
    if not isinstance(environment, ScoresGroups) or not good:
        return rollouts
    scored = list(rollouts)
    try:
        found = await from_outside("score_group", environment.score_group([episodes[i] for i in good]))
    except PalestraError as failure:
        for i in good:
            scored[i] = replace(rollouts[i], stop="failed", error=str(failure))
        return scored
    for i, verdicts in zip(good, found or (), strict=found is not None):
        scored[i] = replace(rollouts[i], scores={**rollouts[i].scores, **verdicts})
    return scored


def with_call_metrics(group: Group, calls: CallLog) -> Group:
    """The group with the metrics of its judges and simulated users."""
    return replace(group, metrics={**group.metrics, **calls.counts, **length_metrics(group.rollouts, calls.judges)})


async def begun(attempts: Iterable[Coroutine[Any, Any, Group]], at_once: int) -> list[asyncio.Task[Group]]:
    """Start in batches, so that the GPU can begin decoding while the remaining prompts are rendered."""
    tasks: list[asyncio.Task[Group]] = []
    try:
        for i, attempt in enumerate(attempts):
            tasks.append(asyncio.create_task(attempt))
            for _ in range(0 if (i + 1) % at_once else ROUNDS_BETWEEN):
                await asyncio.sleep(0)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    return tasks


async def all_groups(tasks: Sequence[asyncio.Task[Group]], rewards: RewardFunctions) -> list[Group]:
    """What the tasks give, by rewards that work; none is left in progress if one fails."""
    try:
        groups = list(await asyncio.gather(*tasks))
        rewards.require_working()
        return groups
    except OutOfThreads as error:
        raise UserCodeError(str(error)) from error
    finally:
        for task in tasks:
            task.cancel()


def token_speakers(
    policy: Policy[Any], chat: ChatFormat, unexpected: UnexpectedCalls = "execute"
) -> Callable[[Sequence[Episode]], list[Speaker]]:
    """Sessions of a policy; siblings with the same prompt share its computation."""

    def start(episodes: Sequence[Episode]) -> list[Speaker]:
        openings = [(e.prompt, [t.schema for t in e.tools]) for e in episodes]
        if all(opening == openings[0] for opening in openings):
            with phases("template"):
                prompts = [chat.prompt(*openings[0])] * len(openings)
            sessions = policy.fork(policy.open(prompts[0].token_ids.tolist()), len(prompts))
        else:
            with phases("template"):
                prompts = [chat.prompt(*opening) for opening in openings]
            sessions = _open_all(policy, prompts)
        return [
            TokenSpeaker(policy, session, chat, prompt, tools, unexpected)
            for session, prompt, (_, tools) in zip(sessions, prompts, openings, strict=True)
        ]

    return start


def _open_all(policy: Policy[Any], prompts: Sequence[Turn]) -> list[Any]:
    """A session for each prompt, or none if one is refused."""
    sessions: list[Any] = []
    try:
        for prompt in prompts:
            sessions.append(policy.open(prompt.token_ids.tolist()))
    except PalestraError:
        for session in sessions:
            policy.close(session)
        raise
    return sessions


def endpoint_speakers(endpoint: ChatEndpoint) -> Callable[[Sequence[Episode]], list[Speaker]]:
    """Conversations with a chat endpoint."""

    def start(episodes: Sequence[Episode]) -> list[Speaker]:
        return [EndpointSpeaker(endpoint, e.prompt, [t.schema for t in e.tools]) for e in episodes]

    return start


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
