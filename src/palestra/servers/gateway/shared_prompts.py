"""Prompts that several attempts or lineages share are rendered and computed once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.core.types import Message, Turn
from palestra.policy.base import Policy

_WORTH_SHARING = 16  # tokens; the first few of a template are the same in every conversation


@dataclass(eq=False, slots=True)
class SharedPrompts:
    """The sessions of a group of siblings. Close it when they have ended.

    The first that opens a prompt forks it for all. Any other beginning goes on from the open session with which it has
    the most tokens in common, where the policy can branch: an edited history, a subagent with the same instructions.
    With 0 siblings nothing is shared here: the engine finds the prefixes of a server's closed sessions itself.
    """

    policy: Policy[Any]
    siblings: int
    _forks: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    _open: dict[int, Any] = field(default_factory=dict)  # handed out and not closed yet, by their id()
    _rendered: dict[Any, Turn] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], opening: str, make: Callable[[], Turn]) -> Turn:
        """The tokens of an opening; `opening` names its tools and variables."""
        if self.siblings <= 1 or any(message.tool_calls for message in messages):
            return make()
        key = (opening, tuple(messages))
        if key not in self._rendered:
            self._rendered[key] = make()
        return self._rendered[key]

    def open(self, prompt_ids: Sequence[int]) -> tuple[Any, int]:
        """A session with a prompt that siblings may open, too, and how many of its tokens another one had."""
        if self.siblings <= 1:  # nothing to share, and computing in two steps what could be one is slower
            return self.branch(prompt_ids)
        key = tuple(prompt_ids)
        if forks := self._forks.get(key):
            session = forks.pop()
            self._note(session)
            return session, 0
        session, shared = self.branch(prompt_ids)
        if not shared and key not in self._forks:
            session, *self._forks[key] = self.fork(session, self.siblings)
            for each in self._forks[key]:
                self._open.pop(id(each), None)
        return session, shared

    def branch(self, token_ids: Sequence[int]) -> tuple[Any, int]:
        """A session with these tokens, and how many of them it shares with another one."""
        source, shared = self._most_alike(token_ids)
        if source is None:
            session, shared = self.policy.open(token_ids), 0
        else:
            session = self.policy.branch(source, shared)
            self.policy.append(session, token_ids[shared:])
        self._note(session)
        return session, shared

    def fork(self, session: Any, n: int) -> list[Any]:
        """Replace a session by n copies."""
        forks = self.policy.fork(session, n)
        self._open.pop(id(session), None)
        for each in forks:
            self._note(each)
        return forks

    def close_session(self, session: Any) -> None:
        self._open.pop(id(session), None)
        self.policy.close(session)

    def close(self) -> None:
        for forks in self._forks.values():
            for session in forks:
                self.policy.close(session)
        self._forks.clear()

    def _note(self, session: Any) -> None:
        if self.siblings and self.policy.can_branch:
            self._open[id(session)] = session

    def _most_alike(self, token_ids: Sequence[int]) -> tuple[Any, int]:
        """The session that begins most like these tokens, and how many they have in common; None if too few."""
        best, longest = None, _WORTH_SHARING - 1
        for session in reversed(self._open.values()):
            if session.token_ids[longest : longest + 1] != token_ids[longest : longest + 1]:
                continue  # it cannot be better
            if (length := _in_common(token_ids, session.token_ids)) > longest:
                best, longest = session, length
        return best, longest


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[: i + 1] != b[: i + 1])
