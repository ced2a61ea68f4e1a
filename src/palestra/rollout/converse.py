"""Chat with a policy outside of any environment: a fixed opening, tools, no score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.agents.tools.tool import Tool
from palestra.core.errors import PalestraError
from palestra.core.types import Message, Problem, Rollout, Score, StopReason, ToolResult, Turn
from palestra.models.chat.template import ChatFormat
from palestra.policy.base import Policy
from palestra.rollout.agent_loop import Attempt, AttemptLimits, TokenSpeaker, play, run_attempt


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode without replies and without measures."""

    prompt: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return ()

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        return self.scores

    def close(self) -> None: ...


async def converse(
    policy: Policy[Any], chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool], limits: AttemptLimits
) -> Rollout:
    """Let the policy answer `messages`, calling tools as it goes."""
    episode = Conversation(tuple(messages), tuple(tools))
    schemas = [tool.schema for tool in tools]
    prompt = chat.prompt(episode.prompt, schemas)
    session = policy.open(prompt.token_ids.tolist())
    speaker = TokenSpeaker(policy, session, chat, prompt, schemas, limits.unexpected_call_format)
    return await run_attempt(speaker, episode, Problem("chat", episode.prompt), limits)


class ChatSession:
    """A conversation of several questions. Earlier turns keep the tokens that were sampled."""

    def __init__(
        self,
        policy: Policy[Any],
        chat: ChatFormat,
        tools: Sequence[Tool],
        limits: AttemptLimits,
        instructions: str = "",
    ) -> None:
        self._policy = policy
        self._chat = chat
        self._tools = tuple(tools)
        self._limits = limits
        self._opening = [Message("system", instructions)] if instructions else []
        self._session: Any = None
        self._speaker: TokenSpeaker | None = None
        self.messages: list[Message] = list(self._opening)

    async def say(self, text: str, on_message: Callable[[Message], None] = lambda message: None) -> StopReason:
        """Let the model answer, calling tools as it goes; `on_message` is called with each new message.

        An answer that fails or is cancelled leaves the conversation as it was.
        """
        messages = [*self.messages, Message("user", text)]
        try:
            if self._session is not None:
                try:
                    turns = self._chat.continuation(messages[-1:], last_token=self._session.token_ids[-1])
                    self._policy.append(self._session, [i for turn in turns for i in turn.token_ids.tolist()])
                except PalestraError:  # a template that cannot be extended by a user's message is rendered again
                    self._close()
            if self._session is None:
                prompt = self._chat.prompt(messages, [tool.schema for tool in self._tools])
                self._session = self._policy.open(prompt.token_ids.tolist())
            so_far = Turn("template", self._session.token_ids)
            schemas, unexpected = [tool.schema for tool in self._tools], self._limits.unexpected_call_format
            self._speaker = TokenSpeaker(self._policy, self._session, self._chat, so_far, schemas, unexpected)
            attempt = Attempt(messages, on_message=on_message)
            episode = Conversation(tuple(messages), self._tools)
            stop = await play(self._speaker, episode, attempt, self._limits)
        except BaseException:
            self._close()
            raise
        finally:
            self._speaker = None
        self.messages = attempt.messages
        if stop in ("truncated", "context_full"):  # in the middle of a message: the next question renders all again
            self._close()
        return stop

    def reset(self) -> None:
        """Forget all but the instructions."""
        self._close()
        self.messages = list(self._opening)

    @property
    def so_far(self) -> str:
        """The part of the current message that has been sampled; empty between messages."""
        return "" if self._speaker is None or self._session is None else self._speaker.unread_text

    @property
    def token_count(self) -> int:
        return 0 if self._session is None else len(self._session.token_ids)

    def _close(self) -> None:
        if self._session is not None:
            self._policy.close(self._session)
            self._session = None
