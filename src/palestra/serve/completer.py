"""A policy with its tokenizer: prompts in, completions out, whole or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams, Turn
from palestra.policy.base import Policy
from palestra.serve.sampling_fields import SamplingFields

_POLL_S = 0.01
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """`n` completions of one prompt; a stream keeps back `hold` and all text that follows it."""

    prompt_ids: tuple[int, ...]
    n: int
    params: SamplingParams
    hold: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice. The ids include what ended it; the text does not."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # of the weights that sampled each token
    text: str
    finish: Literal["stop", "length"]
    matched: int | str | None = None


class Completer:
    """Completions by the policy's continuous batching; new weights are used from the next token on."""

    def __init__(self, policy: Policy[Any], tokenizer: Any, name: str, context_tokens: int) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.name = name
        self.context_tokens = context_tokens
        self.on_request: Callable[[SamplingRequest], None] = lambda request: None
        self._chat: ChatFormat | None = None
        self._no_chat = ""
        try:
            self._chat = ChatFormat(tokenizer)
        except PalestraError as reason:
            self._no_chat = str(reason)
        eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos: tuple[int, ...] = self._chat.stop_token_ids if self._chat else eos

    @property
    def chat(self) -> ChatFormat:
        if self._chat is None:
            raise PalestraError(self._no_chat)
        return self._chat

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text)["input_ids"])

    def request(self, prompt_ids: Sequence[int], fields: SamplingFields, default_new_tokens: int) -> SamplingRequest:
        """What to sample for a prompt, within the room that it leaves in the context."""
        room = self.context_tokens - len(prompt_ids)
        if room < 1:
            raise PalestraError(
                f"the prompt has {len(prompt_ids)} tokens; the context holds {self.context_tokens}, a sampled one "
                "included; shorten it"
            )
        request = SamplingRequest(tuple(prompt_ids), fields.choices, fields.params(self.eos, room, default_new_tokens))
        self.on_request(request)
        return request

    async def complete(self, request: SamplingRequest) -> list[Completion]:
        """Exactly n completions; cancelling this cancels their sampling."""
        sessions = self._open(request)
        try:
            sampled = await asyncio.gather(
                *(self.policy.sample(s, _seeded(request, i)) for i, s in enumerate(sessions)),
            )
        finally:
            for session in sessions:
                self.policy.close(session)
        return [self.completion(one, request.params) for one in sampled]

    async def stream(self, request: SamplingRequest) -> AsyncGenerator[tuple[int, str | Completion | None], None]:
        """(choice, new text) as it comes, (choice, Completion) when one has ended, (-1, None) while nothing does."""
        sessions = self._open(request)
        tasks = [asyncio.ensure_future(self.policy.sample(s, _seeded(request, i))) for i, s in enumerate(sessions)]
        texts = [
            TextStream(self.tokenizer, (*request.params.stop, *request.hold), request.params.stop_token_ids)
            for _ in sessions
        ]
        start, open_choices = len(request.prompt_ids), set(range(len(tasks)))
        try:
            while open_choices:
                await asyncio.wait(
                    {tasks[i] for i in open_choices}, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED
                )
                for i in sorted(open_choices):
                    if tasks[i].done():
                        open_choices.discard(i)
                        yield i, self.completion(tasks[i].result(), request.params)
                    elif new := texts[i].push(sessions[i].token_ids[start:]):
                        yield i, new
                yield -1, None
        finally:  # without waiting: a cancelled stream may have every wait in here cancelled, too
            for session, task in zip(sessions, tasks, strict=True):
                task.cancel()
                self.policy.close(session)
            asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, request: SamplingRequest) -> list[Any]:
        session = self.policy.open(request.prompt_ids)
        return self.policy.fork(session, request.n) if request.n > 1 else [session]

    def completion(self, turn: Turn, params: SamplingParams) -> Completion:
        ids, matched = turn.token_ids.tolist(), None
        finish: Literal["stop", "length"] = "stop" if turn.finish == "stop" else "length"
        if finish == "stop" and ids and ids[-1] in params.stop_token_ids:
            matched = ids.pop()
        text = decode(self.tokenizer, ids)
        arrays = turn.token_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist()
        stops = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if stops and matched is None:
            at, stop_text = min(stops)
            return Completion(*arrays, text[:at], finish, stop_text)
        return Completion(*arrays, text, finish, matched)


class TextStream:
    """Text out of growing token ids: whole characters only, and nothing that may turn out to be held back."""

    def __init__(self, tokenizer: Any, hold: tuple[str, ...], stop_token_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._hold = hold
        self._stops = stop_token_ids
        self._text = ""
        self._sent = 0
        self._start = self._end = 0  # ids[start:end] are decoded again: what follows may depend on them

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain since the last time."""
        if len(ids) > self._end and ids[-1] not in self._stops:
            known = decode(self._tokenizer, ids[self._start : self._end])
            longer = decode(self._tokenizer, ids[self._start :])
            if not longer.endswith("\ufffd"):  # half a character: wait for the rest
                self._text += longer[len(known) :]
                self._start, self._end = self._end, len(ids)
        safe = certain(self._text, self._hold)
        new, self._sent = safe[self._sent :], max(self._sent, len(safe))
        return new


def certain(text: str, hold: Sequence[str]) -> str:
    """The text before the first held-back piece, and before an end that may be the beginning of one.

    >>> certain("so <tool", ("<tool_call>",)), certain("a STOP b", ("STOP",))
    ('so ', 'a ')
    """
    end = min((text.find(piece) for piece in hold if piece in text), default=len(text))
    for piece in hold:
        for length in range(min(len(piece) - 1, len(text)), 0, -1):
            if text.endswith(piece[:length]):
                end = min(end, len(text) - length)
                break
    return text[:end]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of the ids, special tokens included: a `<tool_call>` may be one."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _seeded(request: SamplingRequest, index: int) -> SamplingParams:
    return replace(request.params, seed=request.params.seed + index * _SEED_STRIDE)
