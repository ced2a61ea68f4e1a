"""One attempt: the agent loop, tokens in and tokens out."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError, RolloutError
from palestra.core.types import Message, Problem, Rollout, SamplingParams, StopReason, ToolResult, Turn
from palestra.envs.base import Episode
from palestra.policy.base import Policy
from palestra.tools.run import run_calls
from palestra.tools.tool import Tool

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """How one attempt samples and where it ends. `sampling.max_new_tokens` counts all its turns.

    With `constrain_tool_calls`, they are sampled by a grammar of the episode's tools and their schemas.
    """

    sampling: SamplingParams
    max_tool_rounds: int = 5
    tool_timeout_s: float = 30.0
    constrain_tool_calls: bool = False


@dataclass(slots=True)
class Attempt:
    """What an attempt has gathered so far; `on_message` is told of each new message."""

    turns: list[Turn]
    messages: list[Message]
    tool_results: list[ToolResult] = field(default_factory=list)
    tool_seconds: float = 0.0
    on_message: Callable[[Message], None] = lambda message: None

    def add(self, *messages: Message) -> None:
        self.messages += messages
        for message in messages:
            self.on_message(message)

    @property
    def sampled(self) -> int:
        return sum(len(t.token_ids) for t in self.turns if t.maker == "model")

    @property
    def token_ids(self) -> list[int]:
        return [i for turn in self.turns for i in turn.token_ids.tolist()]


async def run_rollout(
    policy: Policy[Any],
    session: Any,
    chat: ChatFormat,
    episode: Episode,
    problem: Problem,
    prompt: Turn,
    limits: Limits,
) -> Rollout:
    """Play `episode` to its end from a session that holds `prompt`, and score it.

    What the environment or a tool does wrong is recorded on the rollout, as is a conversation that
    the policy refuses (too long, say). A broken policy or record is a crash, and raises.
    """
    began = time.perf_counter()
    attempt = Attempt([prompt], list(episode.prompt))
    stop: StopReason = "failed"
    error = None
    scores = {}
    try:
        stop = await play(policy, session, chat, episode, attempt, limits)
        scores = dict(await from_outside("scoring", episode.score(attempt.messages, attempt.tool_results)))
    except PalestraError as failure:
        stop, error = "failed", str(failure)
    finally:
        policy.close(session)
        episode.close()
    return Rollout(
        problem_id=problem.id,
        turns=tuple(attempt.turns),
        messages=tuple(attempt.messages),
        stop=stop,
        tool_results=tuple(attempt.tool_results),
        scores=scores,
        seconds=time.perf_counter() - began,
        tool_seconds=attempt.tool_seconds,
        error=error,
    )


async def play(
    policy: Policy[Any], session: Any, chat: ChatFormat, episode: Episode, attempt: Attempt, limits: Limits
) -> StopReason:
    """Sample, call tools, feed their results and sample again, until the model answers or a limit is met."""
    tools = {tool.name: tool for tool in episode.tools}
    sampling = limits.sampling
    if limits.constrain_tool_calls and tools:
        sampling = replace(sampling, grammar=json.dumps([tool.schema for tool in tools.values()], sort_keys=True))
    rounds = 0
    while True:
        left = sampling.max_new_tokens - attempt.sampled
        if left <= 0:
            return "truncated"
        seed = sampling.seed + len(attempt.turns)
        sampled = await policy.sample(session, replace(sampling, max_new_tokens=left, seed=seed))
        if not np.isfinite(sampled.logprobs).all():
            raise RolloutError("the model gave log-probabilities that are not finite; its weights may be broken")
        attempt.turns.append(sampled)
        assert_same_tokens(session.token_ids, attempt.token_ids)
        message = chat.read(sampled.token_ids.tolist())
        attempt.add(message)
        if sampled.finish != "stop":
            return "truncated"
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
        fed = chat.continuation(replies)
        attempt.turns += fed
        policy.append(session, [i for turn in fed for i in turn.token_ids.tolist()])


async def replies_to(
    messages: Sequence[Message], episode: Episode, tools: Mapping[str, Tool], limits: Limits
) -> tuple[Sequence[Message], list[ToolResult]]:
    """What the last message is answered with: the results of its tool calls, or what the environment says."""
    if calls := messages[-1].tool_calls:
        results = await run_calls(tools, calls, limits.tool_timeout_s)
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


def assert_same_tokens(held: Sequence[int], recorded: Sequence[int]) -> None:
    """The policy's session and the record that is trained must be the very same tokens."""
    if list(held) != list(recorded):
        at = next(
            (i for i, (a, b) in enumerate(zip(held, recorded, strict=False)) if a != b), min(len(held), len(recorded))
        )
        raise RuntimeError(
            f"the session holds {len(held)} tokens, the record {len(recorded)}; they part at position {at}: "
            "tokens must be trained exactly as sampled"
        )
