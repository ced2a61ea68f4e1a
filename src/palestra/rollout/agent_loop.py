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
from palestra.core.calls import call_with_limit, user_code
from palestra.core.errors import PalestraError, RolloutError, text_of
from palestra.core.messages import number_calls, with_text
from palestra.core.text import encodable, shorten
from palestra.core.types import Finish, Lineage, Message, Problem, Rollout, SamplingParams, StopReason, ToolResult, Turn
from palestra.envs.base import Episode
from palestra.envs.running import STEP_TIMEOUT_S
from palestra.models.chat.grammars import GrammarText
from palestra.models.chat.toolcalls import UnexpectedCalls

MAX_STATE_CHARS = 200
SUMMARY_REQUEST = (
    "The conversation is getting long. Before you continue, write a summary for yourself: what was asked, what you "
    "have found out and done so far, and what is left to do. Do not call a tool. You will continue with this summary "
    "alone."
)
SUMMARY_OPENING = "You have already begun. Your summary of what you have done so far:"
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
    compact_at: int | None = None  # tokens of a conversation from which it is summarised
    keep_reasoning: bool = True  # False: the model does not read what it thought in earlier turns


class Speaker(Protocol):
    """The model's side of one conversation."""

    turns: list[Turn]  # of the conversation: what is trained; empty where there are no token ids
    sampled_tokens: int
    shows_call_ids: bool  # the model reads the ids of its calls, so the record keeps them

    def length_with(self, replies: Sequence[Message]) -> int:
        """Tokens of the conversation with these replies; estimated where there are no token ids."""
        ...

    async def say(self, sampling: SamplingParams) -> tuple[Message, Finish]:
        """The next assistant message, and why it ended."""
        ...

    def hear(self, messages: Sequence[Message]) -> None:
        """The replies to that message."""
        ...

    def restart(self, messages: Sequence[Message]) -> None:
        """Continue with another conversation. Of these messages nothing is trained: earlier ones have their turns."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Attempt:
    """The messages and tool results of an attempt so far; `on_message` is called with each new message.

    `context` is what the model reads of the messages: all of them, unless its history was shortened. `earlier` are the
    conversations before that, with their turns, and `summaries` the numbers of the turns that shortened them.
    """

    messages: list[Message]
    context: list[Message] = field(init=False)
    earlier: list[tuple[Sequence[Turn], Sequence[Message]]] = field(default_factory=list)
    summaries: list[int] = field(default_factory=list)
    tool_results: list[ToolResult] = field(default_factory=list)
    tool_seconds: float = 0.0
    states: list[str] = field(default_factory=list)  # in which the model's turns began, where the episode names them
    on_message: Callable[[Message], None] = lambda message: None

    def __post_init__(self) -> None:
        self.context = list(self.messages)

    def add(self, *messages: Message) -> None:
        self.messages += messages
        self.context += messages
        for message in messages:
            self.on_message(message)

    def restart(self, speaker: Speaker, context: Sequence[Message], before: Sequence[Message]) -> None:
        """Go on with a history that was changed, after the messages `before`: in a conversation of its own, so that
        every turn is trained once."""
        self.earlier.append((tuple(speaker.turns), tuple(before)))
        self.context = list(context)
        speaker.restart(context)


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
        if not speaker.shows_call_ids:
            first = len(episode.prompt)
            attempt.messages, attempt.tool_results = number_calls(attempt.messages, attempt.tool_results, first)
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
        lineages=tuple(Lineage(tuple(turns), tuple(messages), stop) for turns, messages in attempt.earlier if turns),
        info={"summaries": attempt.summaries} if attempt.summaries else {},
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
    turn = rounds = summaries = 0
    while True:
        left = sampling.max_new_tokens - speaker.sampled_tokens
        if left <= 0:
            return "truncated"
        if (state := await state_key(episode)) is not None:
            attempt.states.append(state)
        this_turn = forced if turn < limits.forced_calls else sampling
        message, finish = await speaker.say(this_turn.for_turn(left, first_seed + turn))
        turn += 1
        attempt.add(message)
        if finish != "stop":
            return why_cut_off(finish, speaker, limits)
        if turn - summaries == getattr(episode, "max_turns", None):
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
        if limits.compact_at is None and limits.keep_reasoning:
            attempt.add(*replies)
            speaker.hear(replies)
            continue
        cut_off = await hear_in_less(speaker, episode, attempt, replies, limits, first_seed + turn)
        if cut_off is not None:
            return cut_off
        turn += len(attempt.summaries) - summaries
        summaries = len(attempt.summaries)


def why_cut_off(finish: Finish, speaker: Speaker, limits: AttemptLimits) -> StopReason:
    """Why a turn ended in the middle."""
    has_tokens_left = speaker.sampled_tokens < limits.sampling.max_new_tokens
    return "context_full" if finish == "length" and bool(speaker.turns) and has_tokens_left else "truncated"


async def hear_in_less(
    speaker: Speaker, episode: Episode, attempt: Attempt, replies: Sequence[Message], limits: AttemptLimits, seed: int
) -> StopReason | None:
    """Let the model read the replies with a history without reasoning, or a summary of it; why that ended the attempt.

    The model writes the summary: a turn like any other, which is trained.
    """
    compacts = limits.compact_at is not None and speaker.length_with(replies) >= limits.compact_at
    said = with_text(replies, SUMMARY_REQUEST) if compacts else replies
    before = list(attempt.context)
    attempt.add(*said)
    if not limits.keep_reasoning and before[-1].reasoning:  # messages are without, so that earlier ones have none
        attempt.restart(speaker, attempt.context, before)
    else:
        speaker.hear(said)
    if not compacts:
        return None
    left = limits.sampling.max_new_tokens - speaker.sampled_tokens
    if left <= 0:
        return "truncated"
    if (state := await state_key(episode)) is not None:
        attempt.states.append(state)
    summary, finish = await speaker.say(limits.sampling.for_turn(left, seed))
    attempt.add(summary)
    attempt.summaries.append(sum(m.role == "assistant" for m in attempt.messages[len(episode.prompt) :]) - 1)
    if finish != "stop":
        return why_cut_off(finish, speaker, limits)
    last = [reply for reply in replies if reply.role == "user"]
    attempt.restart(speaker, after_summary(episode.prompt, summary.text, last), attempt.context)
    return None


def after_summary(prompt: Sequence[Message], summary: str, last: Sequence[Message]) -> list[Message]:
    """The opening of the conversation after a summary. What the environment said last is repeated as it was."""
    said = "".join(f"\n\n{message.text}" for message in last)
    return with_text(prompt, f"{SUMMARY_OPENING}\n{summary or '(nothing)'}{said}")


async def state_key(episode: Episode) -> str | None:
    """The state that an episode is in, where it names one; a long key is hashed."""
    if not callable(method := getattr(episode, "state_key", None)):
        return None
    call = call_with_limit(lambda: None if (key := method()) is None else encodable(str(key)), timeout_s=STEP_TIMEOUT_S)
    key: str | None = await from_outside("state_key", call)
    if key is None or len(key) <= MAX_STATE_CHARS:
        return key
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


async def replies_to(
    messages: Sequence[Message], episode: Episode, tools: Mapping[str, Tool], limits: AttemptLimits
) -> tuple[Sequence[Message], list[ToolResult]]:
    """The replies to the last message: the results of its tool calls, or those of the environment."""
    if calls := messages[-1].tool_calls:
        results = await run_calls(tools, calls, limits.tool_timeout_s, limits.max_tool_result_chars)
        said = [Message("tool", r.content, tool_call_id=r.call.id, name=r.call.name) for r in results]
        return said, results
    replies = await from_outside("the environment's reply", episode.reply(messages))
    return [replace(m, text=shorten(m.text, limits.max_tool_result_chars)) for m in replies], []


async def from_outside(boundary: str, call: Awaitable[T]) -> T:
    """Name an error by the boundary that it crossed."""
    try:
        with user_code():
            return await call
    except Exception as error:
        raise RolloutError(text_of(error, boundary)) from error
