"""What a gateway worker asks of the trainer beyond sampling: scores of tokens, and notes of its requests."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from palestra.core.channel import Handlers
from palestra.core.errors import PalestraError, text_of
from palestra.core.types import SamplingParams
from palestra.models.chat.toolcalls import UnexpectedCalls
from palestra.policy.base import TokenLogprobs
from palestra.policy.channel import ChannelPolicy, PolicyServer
from palestra.servers.openai.completer import Completer, pieces_of


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs of the trainer's completer."""

    tokenizer: bytes  # pickled
    name: str
    context_tokens: int
    vocabulary: int | None
    has_scores: bool
    can_branch: bool
    watches_requests: bool
    unexpected_calls: UnexpectedCalls


class WorkerPolicy(ChannelPolicy):
    """In the worker."""

    def note_request(self, choices: int, params: SamplingParams) -> None:
        """As `Completer.on_request`, of the trainer's completer."""
        self.channel.send("request", choices, params)

    async def score(
        self, token_ids: Sequence[int], start: int, *, top: int = 0, temperature: float = 1.0
    ) -> AsyncIterator[TokenLogprobs]:
        """As `policy.local.token_logprobs`, by the trainer's completer."""
        yield await self.channel.call("score", array("i", token_ids).tobytes(), start, top, temperature)[1]


class CompleterServer(PolicyServer):
    """In the trainer: the completer of one worker."""

    def __init__(self, model: Completer) -> None:
        super().__init__(model.policy)
        self.broken: dict[str, Exception] = {}  # errors that are not the agents', by their texts
        self._model = model
        self._scoring: set[asyncio.Task[None]] = set()

    @property
    def handlers(self) -> Handlers:
        return {**super().handlers, "score": self._score, "request": self._model.on_request, "ping": self._ping}

    def close(self) -> None:
        for task in self._scoring:
            task.cancel()
        super().close()

    def fail(self, call: int, error: Exception) -> None:
        if not isinstance(error, PalestraError):
            text = text_of(error)
            self.broken[text], error = error, RuntimeError(text)
        super().fail(call, error)

    def _ping(self, call: int) -> None:
        self.channel.reply(call, None)

    def _score(self, call: int, token_ids: bytes, start: int, top: int, temperature: float) -> None:
        ids = memoryview(token_ids).cast("i").tolist()
        task = asyncio.get_running_loop().create_task(self._reply_to_score(call, ids, start, top, temperature))
        self._scoring.add(task)
        task.add_done_callback(self._scoring.discard)

    async def _reply_to_score(self, call: int, ids: list[int], start: int, top: int, temperature: float) -> None:
        found, score = TokenLogprobs(), self._model.score
        assert score is not None
        try:
            async for piece in pieces_of(score(ids, start, top=top, temperature=temperature)):
                found.logprobs.extend(piece.logprobs)
                found.top.extend(piece.top)
            self.channel.reply(call, found)
        except Exception as error:
            self.fail(call, error)
