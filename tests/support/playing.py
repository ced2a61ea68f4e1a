"""Attempts at an environment's problems by a scripted model."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.core.types import Group, Message, SamplingParams
from palestra.envs.base import Environment
from palestra.rollout.agent_loop import AttemptLimits, endpoint_speakers
from palestra.rollout.collect import AgentLoop, Collector, require_one_good


@dataclass
class Says:
    """A chat endpoint that answers with what `speak` makes of the messages."""

    speak: Callable[[Sequence[Message]], Message | str]

    async def complete(self, messages: Sequence[Message], tools: Sequence[dict], sampling: SamplingParams) -> Any:
        said = self.speak(messages)
        return said if isinstance(said, Message) else Message("assistant", said), "stop", 1


def attempt(
    environment: Environment, speak: Any, count: int | None = None, group_size: int = 1, **limits: Any
) -> list[Group]:
    """Groups of the first problems; at least one attempt of them goes well."""
    bounds = AttemptLimits(SamplingParams(50), **{"max_tool_rounds": 20} | limits)
    problems = environment.problems("train")[:count]
    collector = Collector(environment, AgentLoop(bounds, endpoint_speakers(Says(speak))))
    groups = asyncio.run(collector.collect(problems, group_size, [problem.id for problem in problems]))
    require_one_good(groups)
    return groups
