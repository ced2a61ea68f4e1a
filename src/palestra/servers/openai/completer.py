"""A policy with its tokenizer: completes prompts, streamed or not."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from palestra.core.errors import (
    ContextLengthError,
    NotAllowedError,
    PalestraError,
    SettingError,
    UnsupportedError,
)
from palestra.core.text import encodable, is_shallow
from palestra.core.types import SamplingParams, Turn
from palestra.models.chat.streaming import CertainText
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.toolcalls import Reply, UnexpectedCalls
from palestra.models.chat.written import check_tool_calls
from palestra.policy.base import Policy, TokenLogprobs

MAX_TOP_LOGPROBS = 20
MAX_INLINE_CHARS = 1 << 14  # a longer text is prepared in a thread, so that it delays no other request
_TOO_MANY = 1.25  # times the context's tokens: counted in chunks, a text may have a few more than as a whole
_POLL_S = 0.01
_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
SEED_STRIDE = 1_000_003  # between the choices of a request
_MAX_TOKENS = 1 << 22  # of the prompts of one request x n

T = TypeVar("T")
# `policy.local.token_logprobs` of a model, or of one in another process
ScoresTokens = Callable[..., Iterator[TokenLogprobs] | AsyncIterator[TokenLogprobs]]


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """`n` completions of one prompt.

    `top_logprobs` adds the most likely tokens at each position; `scores_prompt` adds the prompt's logprobs.
    """

    prompt_ids: tuple[int, ...]
    n: int
    params: SamplingParams
    top_logprobs: int = 0
    scores_prompt: bool = False

    @property
    def seeded(self) -> list[SamplingParams]:
        """The parameters of each completion."""
        return [replace(self.params, seed=self.params.seed + i * SEED_STRIDE) for i in range(self.n)]


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice. The ids include the stop token; the text does not."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]  # of the weights that sampled each token
    text: str
    finish: Literal["stop", "length"]
    matched: int | str | None = None
    top: list[list[tuple[int, float]]] = field(default_factory=list)  # (id, logprob), best first
    prompt: TokenLogprobs | None = None  # of the prompt's tokens but the first


def ignore_request(choices: int, params: SamplingParams) -> None:
    """The default of `Completer.on_request`."""


@dataclass(eq=False, repr=False)
class Completer:
    """Completions by the policy's continuous batching; new weights are used from the next token on."""

    policy: Policy[Any]
    tokenizer: Any
    name: str
    context_tokens: int
    score: ScoresTokens | None = None
    vocabulary: int | None = None
    on_request: Callable[[int, SamplingParams], None] = ignore_request
    unexpected_calls: UnexpectedCalls = "execute"

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "palestra-tokenise")
        self._chat: ChatFormat | None = None
        self._no_chat = ""
        try:
            self._chat = ChatFormat(self.tokenizer)
        except PalestraError as reason:
            self._no_chat = str(reason)
        eos = () if self.tokenizer.eos_token_id is None else (int(self.tokenizer.eos_token_id),)
        self.eos: tuple[int, ...] = self._chat.stop_token_ids if self._chat else eos

    @cached_property
    def twin(self) -> Completer:
        """A copy with its own tokenizer, for preparing requests in a thread: tokenizers are not thread-safe."""
        return replace(self, tokenizer=copy.deepcopy(self.tokenizer))

    def check_tool_calls(self) -> None:
        """Refuse a model whose template writes tool calls that cannot be read; one without a template has no calls."""
        if self._chat is not None:
            check_tool_calls(self._chat, appends=False)

    @property
    def chat(self) -> ChatFormat:
        if self._chat is None:
            raise UnsupportedError(self._no_chat)
        return self._chat

    def read_reply(self, text: str, tools: Sequence[dict[str, Any]], prompt_end: str) -> Reply:
        """Parse reasoning, text and calls; if a client cannot read any of the calls, they stay in the text."""
        whole = self.chat.parse_text(text, prompt_end)
        if not tools:
            return whole
        reply = self.chat.parse(text, tools, prompt_end, self.unexpected_calls)
        good = tuple(call for call in reply.calls if call.error is None and _is_json(call.arguments))
        return replace(reply, calls=good) if good else whole

    @cached_property
    def max_characters(self) -> int:
        """Maximum number of characters that can fit the context."""
        longest = max((len(token) for token in self.tokenizer.get_vocab()), default=1)
        return self.context_tokens * longest

    def check_length(self, characters: int) -> None:
        """Refuse a text that cannot fit before it is tokenised, since tokenising is slow."""
        if characters > self.max_characters:
            raise ContextLengthError(
                f"the prompt has {characters} characters, more than {self.context_tokens} tokens can hold; shorten it",
                self.context_tokens,
            )

    def check_tokens(self, texts: Iterable[str]) -> None:
        """Refuse texts that have far more tokens than the context; tokenise a bounded chunk at a time to find out."""
        tokens, backend = 0, self.tokenizer.backend_tokenizer
        for whole in texts:
            for start in range(0, len(whole), MAX_INLINE_CHARS):
                chunk = encodable(whole[start : start + MAX_INLINE_CHARS])
                # without holding the GIL
                tokens += len(backend.encode_batch_fast([chunk], add_special_tokens=False)[0])
                if tokens > (limit := self.context_tokens) * _TOO_MANY:
                    raise ContextLengthError(
                        f"the prompt has more than {limit} tokens, all that the context holds; shorten it", limit
                    )

    async def prepare(self, characters: int, work: Callable[[Completer], T]) -> T:
        """Return `work(completer)`; runs in a thread if its text has more than MAX_INLINE_CHARS characters."""
        if characters <= MAX_INLINE_CHARS:
            return work(self)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self.twin))

    def encode(self, text: str) -> tuple[int, ...]:
        self.check_length(len(text))
        return tuple(self.tokenizer(text)["input_ids"])

    def check_total(self, tokens: int) -> None:
        """Refuse a request for too many choices of long prompts."""
        if tokens > _MAX_TOKENS:
            raise NotAllowedError(
                f"the prompts have {tokens} tokens x n together; up to {_MAX_TOKENS} are accepted in one request"
            )

    def room_after(self, tokens: int, what: str) -> int:
        """Number of tokens that the context has left after a prompt or a conversation, at least one."""
        if tokens >= self.context_tokens:
            text = f"the {what} has {tokens} tokens; the context holds {self.context_tokens}, a sampled one included"
            raise ContextLengthError(f"{text}; shorten it", self.context_tokens, tokens)
        return self.context_tokens - tokens

    def check_scoring(self, request: SamplingRequest) -> None:
        """Refuse logprobs that would not belong to the sampled distribution."""
        if not (request.top_logprobs or request.scores_prompt):
            return
        params = request.params
        if self.score is None:
            raise UnsupportedError("this server knows the sampled tokens' own logprobs alone; leave top_logprobs out")
        if params.top_p < 1 or params.top_k or params.min_p or params.repetition_penalty != 1 or params.grammar:
            raise SettingError(
                "the most likely tokens are those of the whole distribution; leave top_p, top_k, min_p, "
                "repetition_penalty and grammar out, or the top logprobs"
            )
        if request.scores_prompt and params.temperature not in (0.0, 1.0):
            raise SettingError(
                f"temperature={params.temperature:g} with prompt logprobs, which are not sampled; use 0 or 1"
            )

    async def complete(self, request: SamplingRequest) -> list[Completion]:
        """Sample exactly n completions; cancelling this cancels the sampling."""
        self.on_request(request.n, request.params)
        sampled = [Turn("model", (), (), (), "length")] * request.n  # type: ignore[arg-type]
        if request.params.max_new_tokens:
            sessions = self._open(request)
            try:
                sampled = await asyncio.gather(*map(self.policy.sample, sessions, request.seeded))
            finally:
                for session in sessions:
                    self.policy.close(session)
        return [await self.scored(request, self.completion(one, request.params)) for one in sampled]

    async def scored(self, request: SamplingRequest, completion: Completion) -> Completion:
        """Add the top and prompt logprobs that the request asks for."""
        if not (request.top_logprobs or request.scores_prompt):
            return completion
        ids, length = [*request.prompt_ids, *completion.token_ids], len(request.prompt_ids)
        start = 1 if request.scores_prompt else length
        scores = await self.token_logprobs(ids, start, request.top_logprobs, request.params.temperature or 1.0)
        at = length - start
        prompt = TokenLogprobs(scores.logprobs[:at], scores.top[:at]) if request.scores_prompt else None
        return replace(completion, top=scores.top[at:], prompt=prompt)

    async def token_logprobs(self, ids: Sequence[int], start: int, top: int, temperature: float) -> TokenLogprobs:
        """The logprobs of the tokens from `start` on; other requests sample after each piece of the work."""
        assert self.score is not None
        scores, pieces = TokenLogprobs(), self.score(ids, start, top=top, temperature=temperature)
        while piece := await anext(pieces, None) if isinstance(pieces, AsyncIterator) else next(pieces, None):
            scores.logprobs.extend(piece.logprobs)
            scores.top.extend(piece.top)
            await asyncio.sleep(0)
        return scores

    async def stream(self, request: SamplingRequest) -> AsyncGenerator[tuple[int, str | Completion | None], None]:
        """Yield (choice, new text), (choice, Completion) at a choice's end, and (-1, None) while nothing is new."""
        self.on_request(request.n, request.params)
        sessions = self._open(request)
        tasks = [asyncio.ensure_future(turn) for turn in map(self.policy.sample, sessions, request.seeded)]
        try:
            async for i, piece in self.texts(tasks, sessions, len(request.prompt_ids), request.params):
                if isinstance(piece, Turn):
                    yield i, await self.scored(request, self.completion(piece, request.params))
                else:
                    yield i, piece
        finally:  # without waiting: a cancelled stream may have every wait in here cancelled, too
            for session, task in zip(sessions, tasks, strict=True):
                task.cancel()
                self.policy.close(session)
            asyncio.gather(*tasks, return_exceptions=True)

    def _open(self, request: SamplingRequest) -> list[Any]:
        session = self.policy.open(request.prompt_ids)
        return self.policy.fork(session, request.n) if request.n > 1 else [session]

    async def texts(
        self, tasks: Sequence[asyncio.Future[Turn]], sessions: Sequence[Any], start: int, params: SamplingParams
    ) -> AsyncGenerator[tuple[int, str | Turn | None], None]:
        """Yield (number, new text) of each task's turn, (number, Turn) at its end, and (-1, None) after each look.

        The turns have the same stops, and begin at the token `start` of their sessions.
        """
        texts = [TextStream(self.tokenizer, params.stop, params.stop_token_ids) for _ in tasks]
        under_way = dict(enumerate(tasks))
        while under_way:
            await asyncio.wait(under_way.values(), timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for i, task in list(under_way.items()):
                if task.done():
                    yield i, under_way.pop(i).result()
                elif new := texts[i].push(sessions[i].token_ids[start:]):
                    yield i, new
            yield -1, None

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
    """Text of growing token ids: whole characters only, without text that may become a stop sequence."""

    def __init__(self, tokenizer: Any, hold: tuple[str, ...], stop_token_ids: tuple[int, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._certain = CertainText(hold)
        self._stops = stop_token_ids
        self._start = self._end = 0  # ids[start:end] are decoded again: what follows may depend on them

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain since the last call."""
        if len(ids) <= self._end or ids[-1] in self._stops:
            return ""
        known = decode(self._tokenizer, ids[self._start : self._end])
        longer = decode(self._tokenizer, ids[self._start :])
        if longer.endswith("\ufffd"):  # half a character: wait for the rest
            return ""
        self._start, self._end = self._end, len(ids)
        return self._certain.push(longer[len(known) :])


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of the ids, special tokens included: a `<tool_call>` may be one."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:  # without the checks around it
        return str(backend.decode(ids if isinstance(ids, list) else list(ids), skip_special_tokens=False))
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _is_json(value: Any) -> bool:
    """Whether strict JSON parsers can read it: Python's also takes NaN, lone surrogates and any depth."""
    try:
        _to_json(value).encode()
    except (ValueError, RecursionError):
        return False
    return is_shallow(value)


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)
