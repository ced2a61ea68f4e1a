"""A policy, an environment and a tool whose every move is written down, and attempts by them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from builders import ANSWER_TEXT as ANSWER
from builders import CALL_TEXT as CALL
from builders import ScriptedPolicy, ScriptedSession, add

from palestra.core.types import Message, Problem, Rollout, SamplingParams, Score, ToolResult
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits, TokenSpeaker, run_attempt

__all__ = [
    "ANSWER", "CALL", "ScriptedEnvironment", "ScriptedEpisode", "ScriptedPolicy", "ScriptedSession", "add", "play",
]  # fmt: skip


@dataclass
class ScriptedEpisode:
    prompt: Sequence[Message] = (Message("system", "Use tools."), Message("user", "What is 2 + 3?"))
    tools: Sequence[Any] = ()
    replies: list[Sequence[Message]] = field(default_factory=list)
    broken: bool = False
    closed: int = 0

    @property
    def environment(self) -> "ScriptedEpisode":
        """What reward functions may look at."""
        return self

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return self.replies.pop(0) if self.replies else ()

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        assert not self.closed
        if self.broken:
            raise ConnectionError("the scoring server is gone")
        return {"right": Score(1.0, "5" in messages[-1].text)}

    def close(self) -> None:
        self.closed += 1


@dataclass
class ScriptedEnvironment:
    """Opens an episode with the problem's messages, and remembers it."""

    tools: Sequence[Any] = (add,)
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    episodes: list[ScriptedEpisode] = field(default_factory=list)

    def problems(self, split: str) -> Sequence[Problem]:
        return ()

    def open(self, problem: Problem) -> ScriptedEpisode:
        prompt = (Message("user", problem.input),) if isinstance(problem.input, str) else problem.input
        self.episodes.append(ScriptedEpisode(prompt, self.tools))
        return self.episodes[-1]


def play(
    tokenizer: Any,
    script: Sequence[str],
    episode: Any = None,
    kind: Any = ScriptedPolicy,
    budget: int = 400,
    **limits: Any,
) -> tuple[Rollout, Any]:
    """One attempt in which the model says the texts of a script, turn by turn, and the policy that sampled them."""
    chat, policy = ChatFormat(tokenizer), kind(tokenizer, lambda number: script[number])
    episode = ScriptedEpisode(tools=[add]) if episode is None else episode
    schemas = [tool.schema for tool in episode.tools]
    prompt = chat.prompt(episode.prompt, schemas)
    options = AttemptLimits(SamplingParams(budget, stop_token_ids=chat.stop_token_ids, seed=100), **limits)
    session = policy.open(prompt.token_ids.tolist())
    speaker = TokenSpeaker(policy, session, chat, prompt, schemas, options.unexpected_call_format)
    rollout = asyncio.run(run_attempt(speaker, episode, Problem("p", "q"), options))
    assert policy.closed == policy.opened, "every session is closed"
    assert not getattr(episode, "closed", 0), "reward functions may look at it before the collector closes it"
    seeds = [params.seed for params in policy.params]
    assert seeds == list(range(100, 100 + len(seeds))), "no two turns share their noise"
    return rollout, policy
