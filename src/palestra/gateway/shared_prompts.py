"""A prompt that several attempts open with is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.policy.base import Policy


class SharedPrompts:
    """The prompts of a group of siblings. The first that opens one forks it for all; close it when they have ended."""

    def __init__(self, policy: Policy[Any], siblings: int) -> None:
        self._policy = policy
        self._siblings = siblings
        self._forks: dict[tuple[int, ...], list[Any]] = {}

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
