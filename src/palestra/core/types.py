"""The data that flows through Palestra: Turn -> Rollout -> Group -> Sample.

Tokens are the truth: what the model sampled is trained as the very same ids, and text is
derived from tokens, never the reverse.

    >>> prompt = Turn("template", (1, 2, 3))
    >>> call = Turn("model", (7, 8), logprobs=(-0.1, -0.7), policy_version=4)
    >>> result = Turn("environment", (9,))
    >>> [t for turn in (prompt, call, result) for t in turn.token_ids]
    [1, 2, 3, 7, 8, 9]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Maker = Literal["model", "environment", "template"]
Finish = Literal["stop", "length", "cancelled"]
StopReason = Literal["answered", "truncated", "tool_limit", "failed"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asked for. `error` is set when its text could not be read as one."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came back from one call: the text that the model reads."""

    call: ToolCall
    content: str
    ok: bool = True
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `text` is what a reader sees; tool calls are apart from it."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of token ids with one maker.

    `model` tokens were sampled (and carry logprobs), `environment` tokens are the body of a tool
    result or of an environment's reply, `template` tokens are prompt and chat scaffold.
    """

    maker: Maker
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    policy_version: int = 0

    def __post_init__(self) -> None:
        count, given = len(self.token_ids), len(self.logprobs)
        expected = count if self.maker == "model" else 0
        if given != expected:
            raise ValueError(f"a {self.maker} turn of {count} tokens has {given} logprobs; expected {expected}")


class Matching(Protocol):
    """Follows the tokens of one turn and says which may come next."""

    def allowed(self) -> bytes | None:
        """A bit for each token id, the lowest first; None when every token may come next."""
        ...

    def accept(self, token_id: int) -> None:
        """This token came next."""
        ...


class Grammar(Protocol):
    """What a turn may say; it never changes, and each turn follows it by a matching of its own."""

    def start(self) -> Matching: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn. The defaults sample the model's own distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled turn: ids (the stop token included), the logprob of each under the sampling
    distribution, why it ended, and the policy version that made it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    policy_version: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """One measure's verdict: a value in 0..1, whether it counts as passed, and why."""

    value: float
    passed: bool
    reason: str = ""
    error: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to solve: its id, what the user says, what is expected, and the whole row."""

    id: str
    input: str | tuple[Message, ...]
    expect: Any = None
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at one problem, whole. `turns[0]` is the prompt."""

    problem_id: str
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    tool_results: tuple[ToolResult, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)
    reward: float = 0.0
    seconds: float = 0.0
    tool_seconds: float = 0.0
    error: str | None = None

    @property
    def passed(self) -> bool:
        """Every measure passed."""
        return bool(self.scores) and all(s.passed for s in self.scores.values())

    @property
    def sampled_tokens(self) -> int:
        return sum(len(t.token_ids) for t in self.turns if t.maker == "model")


@dataclass(frozen=True, slots=True)
class Group:
    """The sibling rollouts of one problem: they share a prompt and are scored against each other."""

    problem_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> list[float]:
        return [r.reward for r in self.rollouts]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row for the learner: flat tokens, who made them, and what they are worth.

    `trained[i]` says that token i was made by the model and counts in the policy loss;
    `observed[i]` that it is the body of a tool result (for ECHO). `logprobs[i]` is the sampler's,
    0.0 where the model did not make the token. The first `prompt_length` tokens are the same for
    every sample of one `group`, so they need computing once.
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    observed: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantage: float
    group: int = 0
    prompt_length: int = 0
    policy_version: int = 0
