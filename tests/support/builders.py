"""Builders shared by all tests: `add`, rollouts, groups, samples, an agent, and a policy that follows a script.

Import them as `from builders import rollout, group, ScriptedPolicy`: tests/support is on the path.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from palestra import Agent, EvalSuite, function_tool
from palestra.algo.batch import Batch
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Message, Rollout, Sample, SamplingParams, Score, ToolCall, ToolResult, Turn
from palestra.core.weights import Weights
from palestra.policy.base import Policy

TINY = "palestra/tiny"
END = "<|im_end|>"  # ends a turn of the embedded model
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>' + END
ANSWER_TEXT = "It is 5." + END
ADD_SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def call_text(arguments: str, name: str = "add") -> str:
    """A tool call as the embedded model writes it, without the token that ends the turn."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tool_result(name: str = "add", content: str = "2", ok: bool = True, **fields: Any) -> ToolResult:
    return ToolResult(ToolCall("c", name), content, ok, **fields)


def turns_of(ids: Sequence[int] = (3, 4, 5), prompt: Sequence[int] = (1, 2), version: int = 0) -> tuple[Turn, ...]:
    """A prompt and one sampled turn that ended with a stop token."""
    return (Turn("template", prompt), Turn("model", ids, [-0.5] * len(ids), version, "stop"))


def rollout(
    reward: float = 1.0,
    *,
    problem: str = "p",
    ids: Sequence[int] = (3, 4, 5),
    prompt: Sequence[int] = (1, 2),
    version: int = 0,
    text: str | None = None,
    passed: bool | None = None,
    **fields: Any,
) -> Rollout:
    """One attempt: a prompt, one sampled turn and a score "right".

    `text` adds a question and this answer as messages; `passed` defaults to a reward of 1; any field of Rollout can be
    given. With `error` the attempt has failed: no turns, no score.
    """
    if fields.get("error") is not None:
        return replace(Rollout(problem, (), (), "failed"), **fields)
    messages = () if text is None else (Message("user", "What is 2 + 3?"), Message("assistant", text))
    score = Score(reward, reward == 1.0 if passed is None else passed)
    turns = turns_of(ids, prompt, version)
    attempt = Rollout(problem, turns, messages, "answered", scores={"right": score}, reward=reward)
    return replace(attempt, **fields)


def group(*rewards: float, problem: str = "p", **fields: Any) -> Group:
    """A group with one rollout for each reward; `fields` are those of `rollout`."""
    return Group(problem, tuple(rollout(reward, problem=problem, **fields) for reward in rewards))


def sample(completion: Sequence[int] = (3, 4, 5), prompt: Sequence[int] = (1, 2), **fields: Any) -> Sample:
    """A training row whose completion was sampled; any field of Sample can be given."""
    trained = [False] * len(prompt) + [True] * len(completion)
    row: dict[str, Any] = {
        "token_ids": [*prompt, *completion],
        "policy_mask": trained,
        "echo_mask": [False] * len(trained),
        "logprobs": [-0.5 if t else 0.0 for t in trained],
        "advantages": 1.0,
        "prompt_length": len(prompt),
    }
    return Sample(**(row | fields))


def agent(name: str = "clerk", model: str = TINY, **fields: Any) -> Agent:
    return Agent(**({"name": name, "model": model, "tools": [add]} | fields))


def suite(*records: dict[str, Any], **fields: Any) -> EvalSuite:
    """Cases (one sum by default) that a constant measure passes."""
    cases = records or ({"input": "What is 2 + 3?", "expect": "5"},)
    return EvalSuite.from_records(list(cases), **({"measures": [lambda ctx: 1.0]} | fields))


def wait_until(condition: Callable[[], Any], within_s: float = 30.0, every_s: float = 0.01) -> Any:
    """The first true value of the condition; fails after `within_s`."""
    until = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < until, f"did not happen within {within_s:g} s"
        time.sleep(every_s)
    return value


@dataclass(eq=False)
class ScriptedSession:
    token_ids: list[int]
    script: list[str] = field(default_factory=list)  # what it will still say
    closed: bool = False


@dataclass
class ScriptedPolicy(Policy[ScriptedSession]):
    """Samples the texts of a script instead of a model.

    A list of texts is sampled turn by turn in every session; each ends its turn. A function gets the number of the
    turn, counted over all sessions; its text ends with a stop token, or else the turn was cut off. Prompts longer
    than `context` are refused. All calls are recorded.
    """

    tokenizer: Any
    script: Sequence[str] | Callable[[int], str]
    version: int = 3
    context: int = 10_000
    sessions: list[ScriptedSession] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)  # the session's tokens before each turn
    sampled: list[list[int]] = field(default_factory=list)
    computed: int = 0  # tokens that were opened or appended

    @property
    def opened(self) -> int:
        return len(self.sessions)

    @property
    def closed(self) -> int:
        return sum(session.closed for session in self.sessions)

    def open(self, prompt_ids: Sequence[int]) -> ScriptedSession:
        if len(prompt_ids) > self.context:
            raise PalestraError(f"the prompt has {len(prompt_ids)} tokens; the model's context holds {self.context}")
        self.computed += len(prompt_ids)
        return self._add(prompt_ids, [] if callable(self.script) else self.script)

    def fork(self, session: ScriptedSession, n: int) -> list[ScriptedSession]:
        session.closed = True
        return [self._add(session.token_ids, session.script) for _ in range(n)]

    def append(self, session: ScriptedSession, token_ids: Sequence[int]) -> None:
        assert not session.closed
        self.computed += len(token_ids)
        session.token_ids += token_ids

    def close(self, session: ScriptedSession) -> None:
        session.closed = True

    async def sample(self, session: ScriptedSession, params: SamplingParams) -> Turn:
        assert not session.closed
        text = self.script(len(self.params)) if callable(self.script) else session.script.pop(0)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        stops = not callable(self.script) or ids[-1] in params.stop_token_ids or bool(params.stop)
        finish = "stop" if stops and len(ids) <= params.max_new_tokens else "length"
        ids = ids[: params.max_new_tokens]
        self.params.append(params)
        self.prompts.append(list(session.token_ids))
        self.sampled.append(ids)
        session.token_ids += ids
        return Turn("model", ids, [-0.5] * len(ids), self.version, finish)

    def update(self, weights: Weights) -> None:
        self.version = weights.version

    def _add(self, token_ids: Sequence[int], script: Sequence[str]) -> ScriptedSession:
        self.sessions.append(ScriptedSession(list(token_ids), list(script)))
        return self.sessions[-1]


class BranchingPolicy(ScriptedPolicy):
    """Continues from the middle of a session without computing its beginning."""

    can_branch = True

    def branch(self, session: ScriptedSession, length: int) -> ScriptedSession:
        assert not session.closed
        return self._add(session.token_ids[:length], session.script)


def samples_of(batch: Batch) -> list[Sample]:
    """The rows of a batch one by one."""
    samples = []
    for row, (first, last) in enumerate(pairwise(batch.offsets.tolist())):
        columns = batch.token_ids, batch.policy_mask, batch.echo_mask, batch.logprobs, batch.advantages, batch.versions
        ids, policy, echo, logprobs, advantages, versions = (column[first:last] for column in columns)
        group, prompt = int(batch.groups[row]), int(batch.prompt_lengths[row])
        samples.append(Sample(ids, policy, echo, logprobs, advantages, group, prompt, versions))
    return samples
