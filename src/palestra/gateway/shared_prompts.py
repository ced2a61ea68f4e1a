"""A prompt that several attempts open with is rendered and computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from palestra.core.types import Message, Turn
from palestra.policy.base import Policy


class SharedPrompts:
    """The prompts of a group of siblings. The first that opens one forks it for all; close it when they have ended."""

    def __init__(self, policy: Policy[Any], siblings: int) -> None:
        self._policy = policy
        self._siblings = siblings
        self._forks: dict[tuple[int, ...], list[Any]] = {}
        self._rendered: dict[Any, Turn] = {}

    def render(self, messages: Sequence[Message], opening: str, make: Callable[[], Turn]) -> Turn:
        """The tokens of an opening; `opening` names its tools and variables."""
        if self._siblings == 1 or any(message.tool_calls for message in messages):
            return make()
        key = (opening, tuple(messages))
        if key not in self._rendered:
            self._rendered[key] = make()
        return self._rendered[key]

    def open(self, prompt_ids: Sequence[int]) -> Any:
        """A session with this prompt."""
        key = tuple(prompt_ids)
        if key not in self._forks:
            session = self._policy.open(prompt_ids)
            # alone there is nothing to share, and computing in two steps what could be one is slower
            self._forks[key] = self._policy.fork(session, self._siblings) if self._siblings > 1 else [session]
        forks = self._forks[key]
        return forks.pop() if forks else self._policy.open(prompt_ids)

    def close(self) -> None:
        for forks in self._forks.values():
            for session in forks:
                self._policy.close(session)
        self._forks.clear()
