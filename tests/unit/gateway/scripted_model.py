"""A policy whose every turn is written down, behind a completer with the embedded model's tokenizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.core.types import Problem, SamplingParams, Turn
from palestra.gateway.attempt import Attempt
from palestra.serve.completer import Completer

PROBLEM = Problem("p1", "What is 2 + 3?")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
END = "<|im_end|>"
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"], "additionalProperties": False}


def call(arguments: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = "<think>hm</think>Let me see.\n" + call('{"a": 2, "b": "é"}') + "\n" + call("{}", "other") + END


@dataclass(eq=False)
class ScriptedSession:
    token_ids: list[int]
    closed: bool = False


@dataclass
class ScriptedPolicy:
    """`say` gives the text of the turn with a number, in the order in which turns are sampled."""

    tokenizer: Any
    say: Callable[[int], str]
    version: int = 3
    sessions: list[ScriptedSession] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    computed: int = 0  # tokens that were opened or appended

    def open(self, prompt_ids: Sequence[int]) -> ScriptedSession:
        self.computed += len(prompt_ids)
        self.sessions.append(ScriptedSession(list(prompt_ids)))
        return self.sessions[-1]

    def fork(self, session: ScriptedSession, n: int) -> list[ScriptedSession]:
        session.closed = True
        made = [ScriptedSession(list(session.token_ids)) for _ in range(n)]
        self.sessions += made
        return made

    def append(self, session: ScriptedSession, token_ids: Sequence[int]) -> None:
        assert not session.closed
        self.computed += len(token_ids)
        session.token_ids += token_ids

    def close(self, session: ScriptedSession) -> None:
        session.closed = True

    async def sample(self, session: ScriptedSession, params: SamplingParams) -> Turn:
        assert not session.closed
        ids = self.tokenizer.encode(self.say(len(self.params)), add_special_tokens=False)[: params.max_new_tokens]
        self.params.append(params)
        self.prompts.append(list(session.token_ids))
        self.sampled.append(ids)
        session.token_ids += ids
        finish = "stop" if ids[-1] in params.stop_token_ids or params.stop else "length"
        return Turn("model", ids, [-0.5] * len(ids), self.version, finish)


class BranchingPolicy(ScriptedPolicy):
    """One that goes on from the middle of a session without computing its beginning."""

    def branch(self, session: ScriptedSession, length: int) -> ScriptedSession:
        assert not session.closed
        self.sessions.append(ScriptedSession(session.token_ids[:length]))
        return self.sessions[-1]


def completer(
    tokenizer: Any,
    say: Callable[[int], str] | Sequence[str],
    context: int = 10_000,
    kind: type[ScriptedPolicy] = ScriptedPolicy,
) -> Completer:
    speak = say if callable(say) else lambda i: say[i]
    return Completer(kind(tokenizer, speak), tokenizer, "scripted", context)


def attempt(model: Completer, **options: Any) -> Attempt:
    sampling = options.pop("sampling", SamplingParams(max_new_tokens=10_000))
    return Attempt(PROBLEM, model, "http://gateway", sampling=sampling, seed=options.pop("seed", 7), **options)
