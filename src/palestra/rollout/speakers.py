"""The model's side of a conversation: a policy that samples tokens, or a chat endpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from palestra.core.errors import PalestraError, RolloutError
from palestra.core.machine import phases
from palestra.core.types import Finish, Message, SamplingParams, Turn
from palestra.envs.base import Episode
from palestra.models.chat.template import PROMPT_END_TOKENS, ChatFormat
from palestra.models.chat.toolcalls import UnexpectedCalls
from palestra.policy.base import Policy
from palestra.policy.openai import OpenAIChat
from palestra.rollout.agent_loop import Speaker

NOT_FINITE = "the model gave log-probabilities that are not finite; its weights may be broken"

_CHARACTERS_PER_TOKEN = 4  # a guess, for endpoints that do not say how many tokens they sampled


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

    async def say(self, sampling: SamplingParams) -> tuple[Message, Finish]:
        turn = await self._policy.sample(self._session, sampling)
        prompt_end = self._prompt_end()
        self._tokens = check_record(self._session, self._tokens, turn)
        self.turns.append(turn)
        self.sampled_tokens += len(turn.token_ids)
        with phases("template"):
            message = self._chat.read(turn.token_ids.tolist(), self._tools, prompt_end, self._unexpected)
        return message, turn.finish or "length"

    def hear(self, messages: Sequence[Message]) -> None:
        with phases("template"):
            turns = self._chat.continuation(messages, last_token=self._session.token_ids[-1])
        new = [token_id for turn in turns for token_id in turn.token_ids.tolist()]
        self._policy.append(self._session, new)
        self._tokens = check_tokens(self._session, self._tokens, new)
        self.turns += turns

    def length_with(self, replies: Sequence[Message]) -> int:
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
        sampled = self._session.token_ids[self._tokens :]
        return self._chat.read(sampled, self._tools, self._prompt_end()).text

    def _prompt_end(self) -> Sequence[int]:
        start = max(0, self._tokens - PROMPT_END_TOKENS)
        return self._session.token_ids[start : self._tokens]


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


class EndpointSpeaker:
    """A chat endpoint. Without token ids its attempts can be scored, not trained."""

    def __init__(self, endpoint: OpenAIChat, messages: Sequence[Message], tools: Sequence[dict[str, object]]) -> None:
        self.turns: list[Turn] = []
        self.sampled_tokens = 0
        self.shows_call_ids = False
        self._endpoint = endpoint
        self._messages = list(messages)
        self._tools = tools

    async def say(self, sampling: SamplingParams) -> tuple[Message, Finish]:
        message, finish, tokens = await self._endpoint.complete(self._messages, self._tools, sampling)
        self._messages.append(message)
        written = len(message.text) + sum(len(str(call.arguments)) for call in message.tool_calls)
        self.sampled_tokens += tokens if tokens is not None else 1 + written // _CHARACTERS_PER_TOKEN
        return message, finish

    def hear(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def length_with(self, replies: Sequence[Message]) -> int:
        return sum(len(message.text) for message in (*self._messages, *replies)) // _CHARACTERS_PER_TOKEN

    def restart(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)

    def close(self) -> None:
        """The endpoint keeps no state."""


def token_speakers(
    policy: Policy[Any], chat: ChatFormat, unexpected: UnexpectedCalls = "execute"
) -> Callable[[Sequence[Episode]], list[Speaker]]:
    """Sessions of a policy; siblings with the same prompt share its computation."""

    def start(episodes: Sequence[Episode]) -> list[Speaker]:
        openings = [(e.prompt, [t.schema for t in e.tools]) for e in episodes]
        if all(opening == openings[0] for opening in openings):
            with phases("template"):
                prompts = [chat.prompt(*openings[0])] * len(openings)
            sessions = policy.fork(policy.open(prompts[0].token_ids.tolist()), len(prompts))
        else:
            with phases("template"):
                prompts = [chat.prompt(*opening) for opening in openings]
            sessions = []
            try:
                for prompt in prompts:
                    sessions.append(policy.open(prompt.token_ids.tolist()))
            except PalestraError:
                for session in sessions:
                    policy.close(session)
                raise
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
