"""Groups of sibling attempts, all at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Problem, Rollout, Turn
from palestra.envs.base import Environment, Episode
from palestra.policy.base import Policy
from palestra.rollout.agent_loop import AttemptLimits, Speaker, run_attempt
from palestra.rollout.rewards import RewardFunction, reward_group
from palestra.rollout.speakers import ChatEndpoint, EndpointSpeaker, TokenSpeaker

OnRollout = Callable[[Rollout], None]


@dataclass(frozen=True, slots=True)
class Collector:
    """Problems -> groups of scored attempts. `start` gives each sibling of a group its speaker."""

    environment: Environment
    limits: AttemptLimits
    start: Callable[[Sequence[Episode]], list[Speaker]]
    reward_functions: tuple[RewardFunction, ...] = ()

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
    ) -> list[Group]:
        """One group for each problem, all running together. The same seed key gives the same rollouts."""
        # All open before the first samples, so that the sampler's batches do not depend on which opened first.
        opened = await asyncio.gather(*(open_episodes(self.environment, p, group_size) for p in problems))
        tasks = [
            asyncio.create_task(self._group(problem, episodes, key, on_rollout))
            for problem, episodes, key in zip(problems, opened, seed_keys, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _group(
        self, problem: Problem, episodes: Sequence[Episode], seed_key: str, on_rollout: OnRollout
    ) -> Group:
        try:
            speakers = self.start(episodes)
        except PalestraError as refused:  # a prompt that is too long, or that the chat template does not take
            for episode in episodes:
                episode.close()
            failed = Rollout(problem.id, (), tuple(episodes[0].prompt), "failed", error=str(refused))
            for _ in episodes:
                on_rollout(failed)
            return Group(problem.id, (failed,) * len(episodes))
        tasks = [
            asyncio.create_task(self._one(problem, episode, speaker, seed_of(f"{seed_key}/{i}"), on_rollout))
            for i, (episode, speaker) in enumerate(zip(episodes, speakers, strict=True))
        ]
        try:
            rollouts = await asyncio.gather(*tasks)
            weights = self.environment.reward_weights
            return Group(problem.id, reward_group(problem, rollouts, episodes, weights, self.reward_functions))
        finally:
            for task in tasks:
                task.cancel()
            for episode in episodes:
                episode.close()

    async def _one(
        self, problem: Problem, episode: Episode, speaker: Speaker, seed: int, on_rollout: OnRollout
    ) -> Rollout:
        limits = replace(self.limits, sampling=replace(self.limits.sampling, seed=seed))
        rollout = await run_attempt(speaker, episode, problem, limits)
        on_rollout(rollout)
        return rollout


def token_speakers(policy: Policy[Any], chat: ChatFormat) -> Callable[[Sequence[Episode]], list[Speaker]]:
    """Sessions of a policy; siblings with the same prompt share its computation."""

    def start(episodes: Sequence[Episode]) -> list[Speaker]:
        openings = [(e.prompt, [t.schema for t in e.tools]) for e in episodes]
        if all(opening == openings[0] for opening in openings):
            prompts = [chat.prompt(*openings[0])] * len(openings)
            sessions = policy.fork(policy.open(prompts[0].token_ids.tolist()), len(prompts))
        else:
            prompts = [chat.prompt(*opening) for opening in openings]
            sessions = _open_all(policy, prompts)
        return [TokenSpeaker(policy, s, chat, p) for s, p in zip(sessions, prompts, strict=True)]

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


async def open_episodes(environment: Environment, problem: Problem, count: int) -> list[Episode]:
    """In threads: an environment may start a program or call a server for each attempt."""
    return list(await asyncio.gather(*(asyncio.to_thread(environment.open, problem) for _ in range(count))))


def require_one_good(groups: Sequence[Group]) -> None:
    """Raise if every attempt failed: there is nothing to learn or to report."""
    errors = [r.error for group in groups for r in group.rollouts]
    if errors and None not in errors:
        raise PalestraError(f"every rollout failed; the first error was {errors[0]}")


def seed_of(key: str) -> int:
    """A seed that depends on the key alone, so that a resumed run samples what the first would have."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
