"""The agent loop: one attempt at a problem, the same for a policy that samples tokens and for a chat endpoint.

A `Speaker` is the model's side of one conversation. Its `turns` are what is trained: empty without token ids. Where it
`shows_call_ids`, the model reads the ids of its calls, so the record keeps them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from palestra.agents.tools.run import run_calls
from palestra.core.calls import call_user_code, in_lane, user_code
from palestra.core.errors import PalestraError, RolloutError, text_of
from palestra.core.machine import phases
from palestra.core.messages import number_calls, with_text
from palestra.core.text import encodable, shorten
from palestra.core.types import Finish, Lineage, Message, Problem, Rollout, SamplingParams, StopReason, ToolResult, Turn
from palestra.envs.base import Episode
from palestra.envs.running import STEP_TIMEOUT_S
from palestra.models.chat.grammars import GrammarText
from palestra.models.chat.template import PROMPT_END_TOKENS, ChatFormat
from palestra.models.chat.toolcalls import UnexpectedCalls
from palestra.policy.base import Policy
from palestra.policy.openai import EndpointSpeaker, OpenAIChat

MAX_STATE_CHARS = 200
SUMMARY_REQUEST = (
    "The conversation is getting long. Before you continue, write a summary for yourself: what was asked, what you "
    "have found out and done so far, and what is left to do. Do not call a tool. You will continue with this summary "
    "alone."
)
SUMMARY_OPENING = "You have already begun. Your summary of what you have done so far:"
NOT_FINITE = "the model gave log-probabilities that are not finite; its weights may be broken"
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
    on_message: Callable[[Message], None] | None = None

    def __post_init__(self) -> None:
        self.context = list(self.messages)

    def add(self, *messages: Message) -> None:
        self.messages += messages
        self.context += messages
        if self.on_message is not None:
            for message in messages:
                self.on_message(message)

    def restart(self, speaker: Speaker, context: Sequence[Message], before: Sequence[Message]) -> None:
        """Begin a conversation with a changed history after the messages `before`: every turn is trained once."""
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
        with in_lane(getattr(episode, "lane", None)):
            stop = await play(speaker, episode, attempt, limits, seed)
            if not speaker.shows_call_ids:
                first = len(episode.prompt)
                attempt.messages, attempt.tool_results = number_calls(attempt.messages, attempt.tool_results, first)
            scores = dict(await wrap_user_error("scoring", episode.score(attempt.messages, attempt.tool_results)))
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
        this_turn = forced if turn < limits.forced_calls else sampling
        cut_off = await sample_turn(speaker, episode, attempt, this_turn, first_seed + turn)
        if cut_off is not None:
            return cut_off
        turn, message = turn + 1, attempt.messages[-1]
        if turn - summaries == getattr(episode, "max_turns", None):
            return "answered"
        if message.tool_calls:
            if rounds == limits.max_tool_rounds:
                return "tool_limit"
            rounds += 1
            began = time.perf_counter()
            results = await run_calls(tools, message.tool_calls, limits.tool_timeout_s, limits.max_tool_result_chars)
            attempt.tool_seconds += time.perf_counter() - began
            attempt.tool_results += results
            replies = [Message("tool", r.content, tool_call_id=r.call.id, name=r.call.name) for r in results]
        else:
            answers = await wrap_user_error("the environment's reply", episode.reply(attempt.messages))
            replies = [replace(m, text=shorten(m.text, limits.max_tool_result_chars)) for m in answers]
        if not replies:
            return "answered"
        if limits.compact_at is None and limits.keep_reasoning:
            attempt.add(*replies)
            speaker.append_replies(replies)
            continue
        cut_off = await append_compacted(speaker, episode, attempt, replies, limits, first_seed + turn)
        if cut_off is not None:
            return cut_off
        turn += len(attempt.summaries) - summaries
        summaries = len(attempt.summaries)


async def sample_turn(
    speaker: Speaker, episode: Episode, attempt: Attempt, sampling: SamplingParams, seed: int
) -> StopReason | None:
    """Add the model's next message, and the state in which it began; the reason where that ends the attempt."""
    left = sampling.max_new_tokens - speaker.sampled_tokens
    if left <= 0:
        return "truncated"
    if callable(state_key := getattr(episode, "state_key", None)):
        key = await call_user_code("state_key", state_key, limit_s=STEP_TIMEOUT_S, then=_state_text)
        if key is not None:
            attempt.states.append(key)
    message, finish = await speaker.generate(sampling.for_turn(left, seed))
    attempt.add(message)
    if finish == "stop":
        return None
    has_tokens_left = speaker.sampled_tokens < sampling.max_new_tokens
    return "context_full" if finish == "length" and bool(speaker.turns) and has_tokens_left else "truncated"


def _state_text(key: Any) -> str | None:
    """A key of a state as a text of limited length."""
    text = None if key is None else encodable(str(key))
    if text is None or len(text) <= MAX_STATE_CHARS:
        return text
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


async def append_compacted(
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
        speaker.append_replies(said)
    if not compacts:
        return None
    count = len(attempt.messages)
    cut_off = await sample_turn(speaker, episode, attempt, limits.sampling, seed)
    if len(attempt.messages) > count:  # also where it was cut off
        attempt.summaries.append(sum(m.role == "assistant" for m in attempt.messages[len(episode.prompt) :]) - 1)
    if cut_off is not None:
        return cut_off
    last = "".join(f"\n\n{reply.text}" for reply in replies if reply.role == "user")  # repeated as it was
    opening = with_text(episode.prompt, f"{SUMMARY_OPENING}\n{attempt.messages[-1].text or '(nothing)'}{last}")
    attempt.restart(speaker, opening, attempt.context)
    return None


async def wrap_user_error(boundary: str, call: Awaitable[T]) -> T:
    """Name an error by the boundary that it crossed, unless `call_user_code` has named it."""
    try:
        with user_code():
            return await call
    except RolloutError:
        raise
    except Exception as error:
        raise RolloutError(text_of(error, boundary)) from error


class TokenSpeaker:
    """A session of a policy. Its turns hold exactly the tokens that were sampled."""

    def __init__(
        self,
        policy: Policy[Any],
        session: Any,
        chat: ChatFormat,
        prompt: Turn,
        tools: Sequence[dict[str, Any]] = (),
        unexpected: UnexpectedCalls = "execute",
    ) -> None:
        self.turns: list[Turn] = [prompt]
        self.sampled_tokens = 0
        self.shows_call_ids = chat.shows_call_ids
        self._policy = policy
        self._session = session
        self._chat = chat
        self._tools = tools
        self._unexpected = unexpected
        self._tokens = len(prompt.token_ids)

    async def generate(self, sampling: SamplingParams) -> tuple[Message, Finish]:
        """The next assistant message, and why it ended."""
        turn = await self._policy.sample(self._session, sampling)
        prompt_end = self._session.token_ids[max(0, self._tokens - PROMPT_END_TOKENS) : self._tokens]
        self._tokens = check_record(self._session, self._tokens, turn)
        self.turns.append(turn)
        self.sampled_tokens += len(turn.token_ids)
        with phases("template"):
            message = self._chat.read(turn.token_ids.tolist(), self._tools, prompt_end, self._unexpected)
        return message, turn.finish or "length"

    def append_replies(self, messages: Sequence[Message]) -> None:
        with phases("template"):
            turns = self._chat.continuation(messages, last_token=self._session.token_ids[-1])
        new = [token_id for turn in turns for token_id in turn.token_ids.tolist()]
        self._policy.append(self._session, new)
        self._tokens = check_tokens(self._session, self._tokens, new)
        self.turns += turns

    def length_with(self, replies: Sequence[Message]) -> int:
        """Tokens of the conversation with these replies."""
        turns = self._chat.continuation(replies, last_token=self._session.token_ids[-1])
        return self._tokens + sum(len(turn.token_ids) for turn in turns)

    def restart(self, messages: Sequence[Message]) -> None:
        """A new session for a changed history; what both have in common is computed once, if the policy can branch."""
        with phases("template"):
            prompt = self._chat.prompt(messages, self._tools)
        ids, old = prompt.token_ids.tolist(), self._session
        pairs = enumerate(zip(ids[:-1], old.token_ids, strict=False))
        shared = next((i for i, (new, known) in pairs if new != known), min(len(ids) - 1, len(old.token_ids)))
        if shared and self._policy.can_branch:
            self._session = self._policy.branch(old, shared)
            self._policy.append(self._session, ids[shared:])
        else:  # a server has a prefix cache
            self._session = self._policy.open(ids)
        self._policy.close(old)
        self.turns, self._tokens = [prompt], check_tokens(self._session, 0, ids)

    def close(self) -> None:
        self._policy.close(self._session)

    @property
    def unread_text(self) -> str:
        """The part of the current message that has been sampled."""
        ids, start = self._session.token_ids, self._tokens
        return self._chat.read(ids[start:], self._tools, ids[max(0, start - PROMPT_END_TOKENS) : start]).text


def check_record(session: Any, start: int, turn: Turn) -> int:
    """Where `turn`, which begins at `start`, ends: the session and the record that is trained hold the same tokens."""
    if not math.isfinite(sum(turn.logprobs.tolist())):  # as a list: numpy takes longer for the usual few dozen
        raise RolloutError(NOT_FINITE)
    return check_tokens(session, start, turn.token_ids.tolist())


def check_tokens(session: Any, start: int, token_ids: list[int]) -> int:
    end, held = start + len(token_ids), session.token_ids
    if len(held) < end or list(held[start:end]) != token_ids:
        raise RuntimeError(
            f"the session holds {len(held)} tokens, which differ from the record between {start} and {end}: "
            "tokens must be trained exactly as sampled"
        )
    return end


Speaker = TokenSpeaker | EndpointSpeaker


def token_speakers(
    policy: Policy[Any], chat: ChatFormat, unexpected: UnexpectedCalls = "execute"
) -> Callable[[Sequence[Episode]], list[Speaker]]:
    """Sessions of a policy; siblings with the same prompt share its computation."""

    def start(episodes: Sequence[Episode]) -> list[Speaker]:
        openings = [(e.prompt, [t.schema for t in e.tools]) for e in episodes]
        is_shared = all(opening == openings[0] for opening in openings)
        with phases("template"):
            prompts = [chat.prompt(*opening) for opening in (openings[:1] if is_shared else openings)]
        sessions: list[Any] = []
        try:
            for prompt in prompts:
                sessions.append(policy.open(prompt.token_ids.tolist()))
        except PalestraError:
            for session in sessions:
                policy.close(session)
            raise
        if is_shared:
            sessions, prompts = policy.fork(sessions[0], len(openings)), prompts * len(openings)
        return [
            TokenSpeaker(policy, session, chat, prompt, tools, unexpected)
            for session, prompt, (_, tools) in zip(sessions, prompts, openings, strict=True)
        ]

    return start


def endpoint_speakers(endpoint: OpenAIChat) -> Callable[[Sequence[Episode]], list[Speaker]]:
    """Conversations with a chat endpoint."""

    def start(episodes: Sequence[Episode]) -> list[Speaker]:
        return [EndpointSpeaker(endpoint, e.prompt, [t.schema for t in e.tools]) for e in episodes]

    return start
