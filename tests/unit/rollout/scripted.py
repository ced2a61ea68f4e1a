"""A policy, an environment and a tool whose every move is written down, for the tests of this folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra import function_tool
from palestra.core.errors import PalestraError
from palestra.core.types import Message, Problem, SamplingParams, Score, ToolResult, Turn

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
ANSWER = "It is 5.<|im_end|>"


@function_tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b


@dataclass(eq=False)
class ScriptedSession:
    token_ids: list[int]
    left: list[str]


@dataclass
class ScriptedPolicy:
    """Samples the texts of the script, turn by turn, in every session. Longer prompts than `context` are refused."""

    tokenizer: Any
    script: list[str]
    version: int = 3
    context: int = 10_000
    closed: int = 0
    opened: int = 0
    params: list[SamplingParams] = field(default_factory=list)

    def open(self, prompt_ids: Sequence[int]) -> ScriptedSession:
        if len(prompt_ids) > self.context:
            raise PalestraError(f"the prompt has {len(prompt_ids)} tokens; the model's context holds {self.context}")
        self.opened += 1
        return ScriptedSession(list(prompt_ids), list(self.script))

    def fork(self, session: ScriptedSession, n: int) -> list[ScriptedSession]:
        self.opened += n - 1  # the forked one is closed
        return [ScriptedSession(list(session.token_ids), list(session.left)) for _ in range(n)]

    def append(self, session: ScriptedSession, token_ids: Sequence[int]) -> None:
        session.token_ids += token_ids

    def close(self, session: ScriptedSession) -> None:
        self.closed += 1

    async def sample(self, session: ScriptedSession, params: SamplingParams) -> Turn:
        self.params.append(params)
        ids = self.tokenizer.encode(session.left.pop(0), add_special_tokens=False)
        finish = "length" if len(ids) > params.max_new_tokens else "stop"
        ids = ids[: params.max_new_tokens]
        session.token_ids += ids
        return Turn("model", ids, [-0.1] * len(ids), self.version, finish)


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
