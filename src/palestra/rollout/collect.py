"""Groups of sibling attempts, all at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Problem, Rollout
from palestra.envs.base import Environment, Episode
from palestra.policy.base import Policy
from palestra.rollout.run import Limits, run_rollout

# TRL's form: (prompts, completions, **columns) -> one float a rollout.
RewardFunction = Callable[..., Sequence[float]]


@dataclass(frozen=True, slots=True)
class Collector:
    """What is needed to turn problems into groups of scored rollouts."""

    environment: Environment
    policy: Policy[Any]
    chat: ChatFormat
    limits: Limits
    reward_functions: tuple[RewardFunction, ...] = ()

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_key: str,
        on_rollout: Callable[[Rollout], None] = lambda r: None,
    ) -> list[Group]:
        """One group for each problem, all running together. The same `seed_key` gives the same rollouts."""
        # All begin before the first samples, so that the sampler's batches do not depend on who was ready first.
        begun = await asyncio.gather(*(self._begin(problem, group_size) for problem in problems))
        tasks = [
            asyncio.create_task(self._group(problem, episodes, seed_key, on_rollout))
            for problem, episodes in zip(problems, begun, strict=True)
        ]
        try:
            groups = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        require_one_good(groups)
        return groups

    async def _begin(self, problem: Problem, size: int) -> list[Episode]:
        """In threads: beginning an attempt may mean to start a program or to ask a server."""
        return await asyncio.gather(*(asyncio.to_thread(self.environment.open, problem) for _ in range(size)))

    async def _group(
        self, problem: Problem, episodes: Sequence[Episode], seed_key: str, on_rollout: Callable[[Rollout], None]
    ) -> Group:
        starts = self._open(episodes)
        tasks = [
            asyncio.create_task(
                self._one(problem, episode, prompt, session, seed_of(f"{seed_key}/{problem.id}/{i}"), on_rollout)
            )
            for i, (episode, (prompt, session)) in enumerate(zip(episodes, starts, strict=True))
        ]
        try:
            rollouts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return Group(problem.id, tuple(self._reward(problem, list(rollouts), episodes)))

    def _open(self, episodes: Sequence[Episode]) -> list[tuple[Any, Any]]:
        """A session for each episode; siblings with the same prompt share its computation."""
        openings = [(e.prompt, [t.schema for t in e.tools]) for e in episodes]
        if all(opening == openings[0] for opening in openings):
            prompts = [self.chat.prompt(*openings[0])] * len(openings)
        else:
            prompts = [self.chat.prompt(*opening) for opening in openings]
        if all(p == prompts[0] for p in prompts):
            sessions = self.policy.fork(self.policy.open(prompts[0].token_ids), len(prompts))
        else:
            sessions = [self.policy.open(p.token_ids) for p in prompts]
        return list(zip(prompts, sessions, strict=True))

    async def _one(
        self,
        problem: Problem,
        episode: Episode,
        prompt: Any,
        session: Any,
        seed: int,
        on_rollout: Callable[[Rollout], None],
    ) -> Rollout:
        limits = replace(self.limits, sampling=replace(self.limits.sampling, seed=seed))
        rollout = await run_rollout(self.policy, session, self.chat, episode, problem, prompt, limits)
        on_rollout(rollout)
        return rollout

    def _reward(
        self,
        problem: Problem,
        rollouts: list[Rollout],
        episodes: Sequence[Episode],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> list[Rollout]:
        weights = self.environment.reward_weights
        rewards = [weighted_reward(r, weights) for r in rollouts]
        # what was played with may be looked at, as in TRL; not every environment has such a thing
        worlds = [e.environment for e in episodes if hasattr(e, "environment")]
        for function in self.reward_functions:
            given = dict(columns or {}) | ({"environments": worlds} if worlds else {})
            more = call_reward_function(function, problem, rollouts, given)
            rewards = [a + b for a, b in zip(rewards, more, strict=True)]
        return [replace(r, reward=reward) for r, reward in zip(rollouts, rewards, strict=True)]


def require_one_good(groups: Sequence[Group]) -> None:
    """Attempts that all failed tell nothing: stop, with the first error named."""
    errors = [r.error for group in groups for r in group.rollouts]
    if errors and None not in errors:
        raise PalestraError(f"every rollout failed; the first error was {errors[0]}")


def weighted_reward(rollout: Rollout, weights: Mapping[str, float]) -> float:
    """The measures' values, weighed and added; a rollout that failed earns nothing."""
    return sum(weights.get(name, 1.0) * score.value for name, score in rollout.scores.items())


def call_reward_function(
    function: RewardFunction,
    problem: Problem,
    rollouts: Sequence[Rollout],
    given: Mapping[str, Sequence[Any]] | None = None,
) -> list[float]:
    """Call a TRL-style reward function for one group. `given` has more columns, with a value a rollout."""
    name = getattr(function, "__name__", repr(function))
    prompts = [_plain(r.messages[: _prompt_count(r)]) for r in rollouts]
    completions = [_plain(r.messages[_prompt_count(r) :]) for r in rollouts]
    columns = {
        key: [value] * len(rollouts) for key, value in problem.row.items() if key not in ("prompts", "completions")
    }
    columns |= {key: list(values) for key, values in (given or {}).items()}
    values = [float(v) for v in function(prompts=prompts, completions=completions, **columns)]
    if len(values) != len(rollouts):
        raise PalestraError(
            f"reward function {name} gave {len(values)} values for {len(rollouts)} completions; return one each"
        )
    return values


def _prompt_count(rollout: Rollout) -> int:
    return next((i for i, m in enumerate(rollout.messages) if m.role == "assistant"), len(rollout.messages))


def _plain(messages: Sequence[Any]) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.text} for m in messages]


def seed_of(key: str) -> int:
    """A seed that depends on the key alone, so that a resumed run samples what the first would have."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
