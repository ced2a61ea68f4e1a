"""A teacher plays the agent: a chat endpoint attempts the problems, and what passes becomes demonstrations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palestra.core.conversations import Conversation, conversation_from, conversation_of
from palestra.core.errors import PalestraError, ServiceError, UnreadableFileError
from palestra.core.files import append_jsonl, read_jsonl
from palestra.core.types import Problem
from palestra.envs.base import Environment, Episode
from palestra.policy.openai import OpenAIChat
from palestra.rollout.agent_loop import AttemptLimits, Speaker, endpoint_speakers
from palestra.rollout.collect import AgentLoop, Collector
from palestra.rollout.rewards import RewardFunctions

log = logging.getLogger("palestra")


@dataclass(slots=True)
class TeacherCost:
    """What the demonstrations of a teacher took."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unreported: int = 0  # requests for which the server reported no tokens
    attempts: int = 0
    passes: int = 0
    errors: int = 0  # attempts that failed because of the endpoint, a tool or a measure
    solved: int = 0  # problems with at least one attempt that passed
    unsolved: int = 0
    from_file: int = 0  # problems whose demonstrations were saved before


async def teacher_demonstrations(
    environment: Environment,
    problems: Sequence[Problem],
    endpoint: OpenAIChat,
    limits: AttemptLimits,
    *,
    attempts: int = 3,
    seed: int = 0,
    file: Path | None = None,
    rewards: RewardFunctions | None = None,
) -> tuple[list[Conversation], TeacherCost]:
    """Let an endpoint attempt each problem until an attempt passes, up to `attempts` times; keep what passes.

    Conversations are added to `file` (a run's `teacher_file`) as soon as they have passed. Problems that the
    file has demonstrations for are not attempted again. PalestraError if every attempt failed with an error.
    """
    known: dict[str, list[Conversation]] = {}  # by the id of their problem
    for number, row in enumerate(read_jsonl(file) if file is not None else (), start=1):
        try:
            conversation = conversation_from(row, f"{file}, line {number}")
            known.setdefault(str(row["problem_id"]), []).append(conversation)
        except (PalestraError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableFileError(
                f"{file}, line {number}: {error}. Take the line out to attempt it again"
            ) from None
    missing = [problem for problem in problems if problem.id not in known]
    cost, before = TeacherCost(from_file=len(problems) - len(missing)), asdict(endpoint.usage)
    first_error: str | None = None
    rewards = rewards or RewardFunctions()
    speakers = endpoint_speakers(endpoint)
    slots = asyncio.Semaphore(Collector(environment, AgentLoop(limits, speakers), rewards).groups_at_once(1))

    async def demonstrate(problem: Problem) -> None:
        """Attempt a problem until an attempt passes."""
        nonlocal first_error
        schemas: dict[str, dict[str, Any]] = {}  # of the tools of its episodes

        def start(episodes: Sequence[Episode]) -> list[Speaker]:
            schemas.update({tool.name: tool.schema for episode in episodes for tool in episode.tools})
            return speakers(episodes)

        collector = Collector(environment, AgentLoop(limits, start), rewards)
        for number in range(attempts):
            [group] = await collector.collect([problem], 1, [f"teacher/{seed}/{problem.id}/{number}"])
            [rollout] = group.rollouts
            cost.attempts += 1
            if rollout.error is not None:
                cost.errors += 1
                first_error = first_error or rollout.error
            elif rollout.passed and not rollout.cut_off:
                cost.passes += 1
                tools, origin = [schemas[name] for name in rollout.tool_names], f"the teacher's answer to {problem.id}"
                try:
                    conversation = conversation_of(rollout.messages, tools, origin)
                except (PalestraError, ValueError) as error:  # a call that cannot be read, for instance
                    log.warning("an answer of the teacher to %s passed, but is not kept: %s", problem.id, error)
                    continue
                cost.solved += 1
                known[problem.id] = [conversation]
                if file is not None:
                    append_jsonl(file, [{"problem_id": problem.id} | conversation.to_dict()])
                return
        cost.unsolved += 1

    async def in_turn(problem: Problem) -> None:
        async with slots:
            await demonstrate(problem)

    tasks = [asyncio.create_task(in_turn(problem)) for problem in missing]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for name, value in asdict(endpoint.usage).items():
            setattr(cost, name, value - before[name])
    if cost.attempts and cost.errors == cost.attempts:
        raise ServiceError(f"every attempt of the teacher failed; the first error was: {first_error}")
    return [each for problem in problems for each in known.get(problem.id, [])], cost
