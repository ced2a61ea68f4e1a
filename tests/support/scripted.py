"""A policy, an environment and a tool whose every move is written down, for the tests of this folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from builders import ANSWER_TEXT as ANSWER
from builders import CALL_TEXT as CALL
from builders import ScriptedPolicy, ScriptedSession, add

from palestra.core.types import Message, Problem, Score, ToolResult

__all__ = ["ANSWER", "CALL", "ScriptedEnvironment", "ScriptedEpisode", "ScriptedPolicy", "ScriptedSession", "add"]


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
