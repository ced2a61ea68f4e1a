"""Talk with a policy outside of any environment: a fixed opening, tools, no score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.types import Message, Problem, Rollout, Score, ToolResult
from palestra.policy.base import Policy
from palestra.rollout.run import Limits, run_rollout
from palestra.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode that says nothing after its opening and judges nothing."""

    prompt: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return ()

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        return self.scores

    def close(self) -> None: ...


async def converse(
    policy: Policy[Any], chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool], limits: Limits
) -> Rollout:
    """Let the policy answer `messages`, calling tools on the way."""
    episode = Conversation(tuple(messages), tuple(tools))
    prompt = chat.prompt(episode.prompt, [tool.schema for tool in tools])
    problem = Problem("chat", episode.prompt)
    return await run_rollout(policy, policy.open(prompt.token_ids), chat, episode, problem, prompt, limits)
