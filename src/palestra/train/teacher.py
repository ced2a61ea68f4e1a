"""A teacher plays the agent: a chat endpoint attempts the problems, and what passes becomes demonstrations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.core.conversations import Conversation, conversation_from, conversation_of
from palestra.core.errors import InputError, PalestraError, ServiceError, UnreadableFileError
from palestra.core.files import append_jsonl, read_jsonl
from palestra.core.types import Problem, Rollout
from palestra.envs.base import Environment, Episode
from palestra.policy.openai import OpenAIChat
from palestra.rollout.agent_loop import AttemptLimits, Speaker, endpoint_speakers
from palestra.rollout.collect import Collector, OnRollout
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


@dataclass(slots=True)
class _Teacher:
    environment: Environment
    endpoint: OpenAIChat
    limits: AttemptLimits
    rewards: RewardFunctions
    group_size: int
    attempts: int
    seed: int
    file: Path | None
    on_rollout: OnRollout
    cost: TeacherCost = field(default_factory=TeacherCost)
    first_error: str | None = None

    def collector(self, schemas: dict[str, dict[str, Any]]) -> Collector:
        """A collector that records the schemas of the episodes' tools."""
        speakers = endpoint_speakers(self.endpoint)

        def start(episodes: Sequence[Episode]) -> list[Speaker]:
            schemas.update({tool.name: tool.schema for episode in episodes for tool in episode.tools})
            return speakers(episodes)

        return Collector(self.environment, self.limits, start, self.rewards)

    async def demonstrate(self, problem: Problem) -> list[Conversation]:
        """The attempts that passed; each round tries `group_size` times, until one passes."""
        schemas: dict[str, dict[str, Any]] = {}
        collector = self.collector(schemas)
        for start in range(0, self.attempts, self.group_size):
            size = min(self.group_size, self.attempts - start)
            key = f"teacher/{self.seed}/{problem.id}/{start}"
            (group,) = await collector.collect([problem], size, [key], self.on_rollout)
            found = [c for r in group.rollouts if (c := self._conversation(r, schemas)) is not None]
            if found:
                self.cost.solved += 1
                unique = list({repr(conversation.messages): conversation for conversation in found}.values())
                if self.file is not None:
                    append_jsonl(self.file, [{"problem_id": problem.id} | each.to_dict() for each in unique])
                return unique
        self.cost.unsolved += 1
        return []

    def _conversation(self, rollout: Rollout, schemas: dict[str, dict[str, Any]]) -> Conversation | None:
        self.cost.attempts += 1
        if rollout.error is not None:
            self.cost.errors += 1
            self.first_error = self.first_error or rollout.error
        if not rollout.passed or rollout.error is not None or rollout.cut_off:
            return None
        self.cost.passes += 1
        tools = [schemas[name] for name in rollout.tool_names]
        try:
            return conversation_of(rollout.messages, tools, f"the teacher's answer to {rollout.problem_id}")
        except (PalestraError, ValueError) as error:  # a call that cannot be read, for instance
            log.warning("an answer of the teacher to %s passed, but is not kept: %s", rollout.problem_id, error)
            return None


async def teacher_demonstrations(
    environment: Environment,
    problems: Sequence[Problem],
    endpoint: OpenAIChat,
    limits: AttemptLimits,
    *,
    group_size: int = 1,
    attempts: int = 3,
    seed: int = 0,
    file: Path | None = None,
    rewards: RewardFunctions | None = None,
    on_rollout: OnRollout = lambda rollout: None,
) -> tuple[list[Conversation], TeacherCost]:
    """Let an endpoint attempt each problem up to `attempts` times, `group_size` at once; keep what passes.

    Conversations are added to `file` (a run's `teacher_file`) as soon as they have passed. Problems that the
    file has demonstrations for are not attempted again. PalestraError if every attempt failed with an error.
    """
    if not 1 <= group_size <= attempts:
        raise InputError(f"group_size={group_size} with attempts={attempts}; expected 1 ≤ group_size ≤ attempts")
    teacher = _Teacher(
        environment, endpoint, limits, rewards or RewardFunctions(), group_size, attempts, seed, file, on_rollout
    )
    saved: dict[str, list[Conversation]] = {}  # by the id of their problem
    for number, row in enumerate(read_jsonl(file) if file is not None else (), start=1):
        try:
            conversation = conversation_from(row, f"{file}, line {number}")
            saved.setdefault(str(row["problem_id"]), []).append(conversation)
        except (PalestraError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnreadableFileError(
                f"{file}, line {number}: {error}. Take the line out to attempt it again"
            ) from None
    missing = [problem for problem in problems if problem.id not in saved]
    teacher.cost.from_file = len(problems) - len(missing)
    slots = asyncio.Semaphore(teacher.collector({}).groups_at_once(group_size))
    before = asdict(endpoint.usage)

    async def one(problem: Problem) -> list[Conversation]:
        async with slots:
            return await teacher.demonstrate(problem)

    tasks = {problem.id: asyncio.create_task(one(problem)) for problem in missing}
    try:
        await asyncio.gather(*tasks.values())
    finally:
        for task in tasks.values():
            task.cancel()
        for name, value in asdict(endpoint.usage).items():
            setattr(teacher.cost, name, value - before[name])
    cost = teacher.cost
    if cost.attempts and cost.errors == cost.attempts:
        raise ServiceError(f"every attempt of the teacher failed; the first error was: {teacher.first_error}")
    passed = {problem_id: task.result() for problem_id, task in tasks.items()} | saved
    return [each for problem in problems for each in passed.get(problem.id, [])], cost
