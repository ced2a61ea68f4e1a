"""Attempts of a chat endpoint: the same loop in messages instead of tokens. They can be scored, not trained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from palestra.core.errors import PalestraError
from palestra.core.types import Finish, Group, Message, Problem, Rollout, SamplingParams, StopReason, ToolResult
from palestra.envs.base import Environment, Episode
from palestra.rollout.collect import require_one_good, seed_of, weighted_reward
from palestra.rollout.run import Limits, from_outside, replies_to


class Chat(Protocol):
    """Something that gives the next assistant message."""

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[dict[str, object]], sampling: SamplingParams
    ) -> tuple[Message, Finish]: ...


@dataclass(frozen=True, slots=True)
class ChatCollector:
    """Problems into groups of scored attempts, as Collector does, by a chat endpoint."""

    environment: Environment
    chat: Chat
    limits: Limits

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_key: str,
        on_rollout: Callable[[Rollout], None] = lambda r: None,
    ) -> list[Group]:
        """One group for each problem, all running together."""

        async def one(problem: Problem, i: int) -> Rollout:
            sampling = replace(self.limits.sampling, seed=seed_of(f"{seed_key}/{problem.id}/{i}"))
            episode = await asyncio.to_thread(self.environment.open, problem)
            rollout = await run_chat(self.chat, episode, problem, replace(self.limits, sampling=sampling))
            rollout = replace(rollout, reward=weighted_reward(rollout, self.environment.reward_weights))
            on_rollout(rollout)
            return rollout

        rows = await asyncio.gather(*(asyncio.gather(*(one(p, i) for i in range(group_size))) for p in problems))
        groups = [Group(problem.id, tuple(row)) for problem, row in zip(problems, rows, strict=True)]
        require_one_good(groups)
        return groups


async def run_chat(chat: Chat, episode: Episode, problem: Problem, limits: Limits) -> Rollout:
    """Play `episode` to its end and score it; what goes wrong outside is recorded on the rollout."""
    began = time.perf_counter()
    messages, results = list(episode.prompt), list[ToolResult]()
    stop: StopReason = "failed"
    error, scores = None, {}
    try:
        stop = await _converse(chat, episode, messages, results, limits)
        scores = dict(await from_outside("scoring", episode.score(messages, results)))
    except PalestraError as failure:
        stop, error = "failed", str(failure)
    finally:
        episode.close()
    return Rollout(
        problem_id=problem.id,
        turns=(),
        messages=tuple(messages),
        stop=stop,
        tool_results=tuple(results),
        scores=scores,
        seconds=time.perf_counter() - began,
        tool_seconds=sum(result.seconds for result in results),
        error=error,
    )


async def _converse(
    chat: Chat, episode: Episode, messages: list[Message], results: list[ToolResult], limits: Limits
) -> StopReason:
    tools = {tool.name: tool for tool in episode.tools}
    schemas = [tool.schema for tool in episode.tools]
    rounds = 0
    while True:
        message, finish = await chat.complete(messages, schemas, limits.sampling)
        messages.append(message)
        if finish == "length":
            return "truncated"
        if message.tool_calls:
            if rounds == limits.max_tool_rounds:
                return "tool_limit"
            rounds += 1
        replies, answers = await replies_to(messages, episode, tools, limits)
        results += answers
        if not replies:
            return "answered"
        messages += replies
