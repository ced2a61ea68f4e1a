"""Talk with a policy outside of any environment: a fixed opening, tools, no score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError
from palestra.core.types import Message, Problem, Rollout, Score, StopReason, ToolResult, Turn
from palestra.policy.base import Policy
from palestra.rollout.run import Attempt, Limits, play, run_rollout
from palestra.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class Conversation:
    """An episode that says nothing after its opening and judges nothing."""

    prompt: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    scores: Mapping[str, Score] = field(default_factory=dict)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return ()

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        return self.scores

    def close(self) -> None: ...


async def converse(
    policy: Policy[Any], chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Tool], limits: Limits
) -> Rollout:
    """Let the policy answer `messages`, calling tools on the way."""
    episode = Conversation(tuple(messages), tuple(tools))
    prompt = chat.prompt(episode.prompt, [tool.schema for tool in tools])
    problem = Problem("chat", episode.prompt)
    return await run_rollout(policy, policy.open(prompt.token_ids), chat, episode, problem, prompt, limits)


class Talk:
    """A conversation that goes on, question by question. What was said stays as the tokens that it was said in."""

    def __init__(
        self, policy: Policy[Any], chat: ChatFormat, tools: Sequence[Tool], limits: Limits, instructions: str = ""
    ) -> None:
        self._policy = policy
        self._chat = chat
        self._tools = tuple(tools)
        self._limits = limits
        self._opening = [Message("system", instructions)] if instructions else []
        self._session: Any = None
        self._attempt: Attempt | None = None
        self.messages: list[Message] = list(self._opening)

    async def say(self, text: str, on_message: Callable[[Message], None] = lambda message: None) -> StopReason:
        """Let the model answer, calling tools on the way; each new message is told as it comes.

        An answer that fails or is cancelled leaves the conversation as it was.
        """
        asked = [*self.messages, Message("user", text)]
        try:
            self._feed(asked)
            said = Turn("template", tuple(self._session.token_ids))
            attempt = self._attempt = Attempt([said], asked, on_message=on_message)
            episode = Conversation(tuple(asked), self._tools)
            stop = await play(self._policy, self._session, self._chat, episode, attempt, self._limits)
        except BaseException:
            self._close()
            raise
        finally:
            self._attempt = None
        self.messages = attempt.messages
        if stop == "truncated":  # in the middle of a message: the next question begins with a fresh rendering
            self._close()
        return stop

    def reset(self) -> None:
        """Forget all but the instructions."""
        self._close()
        self.messages = list(self._opening)

    @property
    def so_far(self) -> str:
        """What the model has written of the message that it is at; empty between messages."""
        if self._attempt is None or self._session is None:
            return ""
        return self._chat.read(self._session.token_ids[len(self._attempt.token_ids) :]).text

    @property
    def token_count(self) -> int:
        return 0 if self._session is None else len(self._session.token_ids)

    def _feed(self, asked: Sequence[Message]) -> None:
        if self._session is not None:
            try:
                fed = self._chat.continuation(asked[-1:])
                self._policy.append(self._session, [i for turn in fed for i in turn.token_ids.tolist()])
                return
            except PalestraError:  # a template that cannot be extended by a user's message is rendered anew
                self._close()
        prompt = self._chat.prompt(asked, [tool.schema for tool in self._tools])
        self._session = self._policy.open(prompt.token_ids)

    def _close(self) -> None:
        if self._session is not None:
            self._policy.close(self._session)
            self._session = None
