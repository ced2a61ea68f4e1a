"""What the three dialects have in common: a body that becomes a request, and answers that become JSON or events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from palestra.servers.gateway.request import Answer, ChatRequest, Piece
from palestra.servers.openai.completer import Completer


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event; OpenAI's Chat Completions have no names for theirs."""

    data: dict[str, Any] | str
    name: str | None = None


class Body(Protocol):
    """A request in one dialect, validated."""

    stream: bool | None

    def request(self, model: Completer) -> ChatRequest: ...

    def response(self, answers: Sequence[Answer], model: Completer) -> dict[str, Any]: ...

    def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]: ...
