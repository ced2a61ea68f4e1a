"""The agent loop: one attempt at a problem, the same for a policy that samples tokens and for a chat endpoint."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from palestra.agents.tools.run import run_calls
from palestra.agents.tools.tool import Tool
from palestra.core.errors import PalestraError, RolloutError
from palestra.core.types import Finish, Message, Problem, Rollout, SamplingParams, StopReason, ToolResult, Turn
from palestra.envs.base import Episode
from palestra.models.chat.grammars import GrammarText
from palestra.models.chat.toolcalls import UnexpectedCalls

MAX_STATE_CHARS = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """How one attempt samples and where it ends. `sampling.max_new_tokens` counts all its turns together.

    With `constrain_tool_calls`, they are sampled by a grammar of the episode's tools and their schemas. The first
    `forced_calls` turns must be a call, by the grammar `call`, into which the episode's tools are put.
    """

    sampling: SamplingParams
    max_tool_rounds: int = 5
    tool_timeout_s: float = 30.0
    max_tool_result_chars: int = 20_000
    constrain_tool_calls: bool = False
    unexpected_call_format: UnexpectedCalls = "execute"
    forced_calls: int = 0
    call: GrammarText | None = None


class Speaker(Protocol):
    """The model's side of one conversation."""

    turns: list[Turn]  # what is trained; empty where there are no token ids
    sampled_tokens: int

    async def say(self, sampling: SamplingParams) -> tuple[Message, Finish]:
        """The next assistant message, and why it ended."""
        ...

    def hear(self, messages: Sequence[Message]) -> None:
        """The replies to that message."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Attempt:
    """The messages and tool results of an attempt so far; `on_message` is called with each new message."""

    messages: list[Message]
    tool_results: list[ToolResult] = field(default_factory=list)
    tool_seconds: float = 0.0
    states: list[str] = field(default_factory=list)  # in which the model's turns began, where the episode names them
    on_message: Callable[[Message], None] = lambda message: None

    def add(self, *messages: Message) -> None:
        self.messages += messages
        for message in messages:
            self.on_message(message)


async def run_attempt(
    speaker: Speaker, episode: Episode, problem: Problem, limits: AttemptLimits, seed: int | None = None
) -> Rollout:
    """Play `episode` to its end and score it; the caller closes it. `seed` stands in for that of the limits.

    An error of the environment or a tool is recorded on the rollout, and so is a conversation that the policy
    refuses, because it is too long for instance. A broken policy or a wrong record raises.
    """
    began = time.perf_counter()
    attempt = Attempt(list(episode.prompt))
    stop: StopReason = "failed"
    error = None
    scores = {}
    try:
        stop = await play(speaker, episode, attempt, limits, seed)
        scores = dict(await from_outside("scoring", episode.score(attempt.messages, attempt.tool_results)))
    except PalestraError as failure:
        stop, error = "failed", str(failure)
    finally:
        speaker.close()
    return Rollout(
        problem_id=problem.id,
        turns=tuple(speaker.turns),
        messages=tuple(attempt.messages),
        stop=stop,
        tool_results=tuple(attempt.tool_results),
        scores=scores,
        seconds=time.perf_counter() - began,
        tool_seconds=attempt.tool_seconds,
        error=error,
        tool_names=tuple(tool.name for tool in episode.tools),
        states=tuple(attempt.states),
    )


async def play(
    speaker: Speaker, episode: Episode, attempt: Attempt, limits: AttemptLimits, seed: int | None = None
) -> StopReason:
    """Sample, call tools, append their results and sample again, until the model answers or a limit is reached.

    A turn's seed is the attempt's plus the number of the turn.
    """
    tools = {tool.name: tool for tool in episode.tools}
    sampling = limits.sampling
    if limits.constrain_tool_calls and tools:
        sampling = replace(sampling, grammar=json.dumps([tool.schema for tool in tools.values()]))
    forced = sampling
    if limits.forced_calls and limits.call is not None and tools:
        schemas = tuple(tool.schema for tool in tools.values())
        forced = replace(sampling, grammar=str(replace(limits.call, tools=schemas)))
    first_seed = sampling.seed if seed is None else seed
    turn = rounds = 0
    while True:
        left = sampling.max_new_tokens - speaker.sampled_tokens
        if left <= 0:
            return "truncated"
        if (state := state_key(episode)) is not None:
            attempt.states.append(state)
        this_turn = forced if turn < limits.forced_calls else sampling
        message, finish = await speaker.say(this_turn.for_turn(left, first_seed + turn))
        turn += 1
        attempt.add(message)
        if finish != "stop":
            full = finish == "length" and bool(speaker.turns) and speaker.sampled_tokens < sampling.max_new_tokens
            return "context_full" if full else "truncated"
        if turn == getattr(episode, "max_turns", None):
            return "answered"
        if message.tool_calls:
            if rounds == limits.max_tool_rounds:
                return "tool_limit"
            rounds += 1
        began = time.perf_counter()
        replies, results = await replies_to(attempt.messages, episode, tools, limits)
        if results:
            attempt.tool_seconds += time.perf_counter() - began
            attempt.tool_results += results
        if not replies:
            return "answered"
        attempt.add(*replies)
        speaker.hear(replies)


def state_key(episode: Episode) -> str | None:
    """The state that an episode is in, where it names one; a long key is hashed."""
    if (method := getattr(episode, "state_key", None)) is None:
        return None
    try:
        key: str | None = method()
    except Exception as error:
        raise RolloutError(f"state_key raised {type(error).__name__}: {error}") from error
    if key is None or len(key) <= MAX_STATE_CHARS:
        return key
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


async def replies_to(
    messages: Sequence[Message], episode: Episode, tools: Mapping[str, Tool], limits: AttemptLimits
) -> tuple[Sequence[Message], list[ToolResult]]:
    """The replies to the last message: the results of its tool calls, or those of the environment."""
    if calls := messages[-1].tool_calls:
        results = await run_calls(tools, calls, limits.tool_timeout_s, limits.max_tool_result_chars)
        return [tool_message(result) for result in results], results
    return await from_outside("the environment's reply", episode.reply(messages)), []


async def from_outside(boundary: str, call: Awaitable[T]) -> T:
    """Name an error by the boundary that it crossed."""
    try:
        return await call
    except Exception as error:
        raise RolloutError(f"{boundary} raised {type(error).__name__}: {error}") from error


def tool_message(result: ToolResult) -> Message:
    return Message("tool", result.content, tool_call_id=result.call.id, name=result.call.name)
