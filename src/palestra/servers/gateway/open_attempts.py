"""The attempts that a server answers, by their ids and keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from palestra.servers.forwarding import KEY_PREFIX, ForwardedAgent
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.http_errors import refuse

_MAX_ENDED = 20_000

AnyAttempt = TypeVar("AnyAttempt", bound=Attempt | ForwardedAgent)


@dataclass(slots=True)
class OpenAttempts(Generic[AnyAttempt]):
    """Open attempts, and the ids and keys of the last ones that ended."""

    _by_id: dict[str, AnyAttempt] = field(default_factory=dict)
    _by_key: dict[str, AnyAttempt] = field(default_factory=dict)
    _ended: dict[str, None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[AnyAttempt]:
        return iter(list(self._by_id.values()))

    def __contains__(self, attempt_id: str) -> bool:
        """Whether the id is that of an attempt, open or ended."""
        return attempt_id in self._by_id or attempt_id in self._ended

    def __getitem__(self, attempt_id: str) -> AnyAttempt:
        return self._by_id[attempt_id]

    def add(self, attempt: AnyAttempt) -> None:
        self._by_id[attempt.id] = self._by_key[attempt.api_key] = attempt

    def forget(self, attempt: Attempt | ForwardedAgent) -> None:
        """Forget an attempt, except that it existed."""
        del self._by_id[attempt.id], self._by_key[attempt.api_key]
        self._ended |= {attempt.id: None, attempt.api_key: None}
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def find(self, attempt_id: str | None, key: str | None) -> AnyAttempt:
        """Find an attempt by its URL or its key. A key opens no other attempt, and none that has ended.

        With the URL, which cannot be guessed, any key of no attempt is accepted: some clients send their own. Keys of
        attempts in other processes are known by their prefix.
        """
        if attempt_id in self._ended or key in self._ended:
            raise refuse(401, "this attempt has ended; its key is not valid any more")
        by_key = self._by_key.get(key or "")
        attempt = by_key if attempt_id is None else self._by_id.get(attempt_id)
        if attempt is None:
            what = "the API key" if attempt_id is None else "the attempt in the URL"
            raise refuse(401, f"{what} belongs to no attempt; use the base URL and the key that the attempt was given")
        if (by_key is not None or (key or "").startswith(KEY_PREFIX)) and by_key is not attempt:
            raise refuse(401, "the API key belongs to another attempt than the URL")
        return attempt
