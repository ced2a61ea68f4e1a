"""A model that helps: a judge, a simulated user, a reflector. An endpoint, a local model, or the policy itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from palestra.core.endpoints import Budgeted, BudgetSpent, CallLimits, Endpoint, EndpointUsage
from palestra.core.errors import PalestraError, RolloutError, UnsupportedError, text_of
from palestra.core.files import append_jsonl, read_jsonl

POLICY = "policy"  # the model that is trained or scored
LOCAL = "local/"  # prefix of a model that is loaded in this process
_LOCAL_TOKENS = 1024  # default number of new tokens of a local model's answer
_MAX_CACHED = 100_000
Chat = Sequence[Mapping[str, str]]  # messages with `role` and `content`
T = TypeVar("T")
log = logging.getLogger("palestra")


# Runs models of this process for all that happens in a collector's rollouts: `rollout.local_models.LocalModels`.
_host: ContextVar[Any] = ContextVar("model_host", default=None)


@contextmanager
def hosting(host: Any) -> Iterator[None]:
    """Let chat models in this context, and in tasks that are created in it, use `host`."""
    token = _host.set(host)
    try:
        yield
    finally:
        _host.reset(token)


@dataclass(slots=True)
class CallLog:
    """Counts of chat models' calls in one group, by their purpose."""

    counts: dict[str, float] = field(default_factory=dict)
    judges: set[str] = field(default_factory=set)  # names of the measures that asked a judge

    def add(self, name: str, amount: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount


_log: ContextVar[CallLog | None] = ContextVar("call_log", default=None)


@contextmanager
def logging_calls() -> Iterator[CallLog]:
    """Count the calls of chat models in this context, and in tasks that are created in it."""
    calls = CallLog()
    token = _log.set(calls)
    try:
        yield calls
    finally:
        _log.reset(token)


def log_judge(measure: str) -> None:
    if (calls := _log.get()) is not None:
        calls.judges.add(measure)


def is_local(model: str) -> bool:
    """Whether a name means a model of this process.

    >>> [is_local(name) for name in ("policy", "palestra/tiny", "local/Qwen/Qwen3-0.6B", "gpt-5-mini")]
    [True, True, True, False]
    """
    named = model == POLICY or model.startswith((LOCAL, "palestra/")) or model.endswith(".gguf")
    return named or ("/" in model and Path(model).expanduser().is_dir())


class ChatModel:
    """Answers of one model, cached by content.

    `model` is "policy" (the model in training), a local model ("local/Qwen/Qwen3-0.6B", a folder, a .gguf file,
    "palestra/…"), or a name at an OpenAI-style endpoint; with `base_url` it is always the latter.
    `cache` is True (in memory), False, or a file that later runs use again.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        purpose: str,
        api_key_env: str = "OPENAI_API_KEY",
        temperature: float | None = 0.0,
        max_new_tokens: int | None = None,
        cache: bool | str | Path = True,
        limits: CallLimits | None = None,
    ) -> None:
        self.model, self.purpose = model, purpose
        self._limits = limits or CallLimits()
        self._is_local = base_url is None and is_local(model)
        self._backend = Budgeted(self._limits, f"the model {model!r}")
        if not self._is_local:
            self._backend = Endpoint(model, base_url, api_key_env, self._limits)
            self._backend.require_key()
        self._temperature, self._max_new_tokens = temperature, max_new_tokens
        keeps = cache is not False and not (self._is_local and model == POLICY)  # the policy changes with every step
        self._cache = _Cache(None if isinstance(cache, bool) else Path(cache)) if keeps else None

    @property
    def usage(self) -> EndpointUsage:
        return self._backend.usage

    @property
    def cost(self) -> float:
        return self._backend.cost

    async def ask(self, messages: Chat, read: Callable[[str], T], *, seed: int = 0) -> T:
        """`read` of the answer, asked for again after one ValueError; RolloutError where the model gives no answer."""
        if self._cache is None:
            return read(await self._ask(messages, read, seed))
        endpoint = getattr(self._backend, "base_url", "")
        parts = [self.model, endpoint, self._temperature, self._max_new_tokens, seed, list(messages)]
        key = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
        return await self._cache.get(key, read, lambda: self._ask(messages, read, seed), self._count)

    async def _ask(self, messages: Chat, read: Callable[[str], T], seed: int) -> str:
        """An answer that `read` accepts."""
        text = await self._complete(messages, seed)
        try:
            read(text)
            return text
        except ValueError as error:
            self._count("unreadable", 1)
            again = {"role": "user", "content": f"This cannot be used: {error}. Answer again, in the form asked for."}
            text = await self._complete([*messages, {"role": "assistant", "content": text}, again], seed + 1)
            read(text)
            return text

    async def _complete(self, messages: Chat, seed: int) -> str:
        try:
            answer = await (self._ask_host(messages, seed) if self._is_local else self._post(messages, seed))
            text = answer["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"its content is a {type(text).__name__}")
        except BudgetSpent:
            self._count("errors", 1)
            raise
        except PalestraError as error:
            self._count("errors", 1)
            raise RolloutError(f"{self.purpose} {self.model}: {error}") from None
        except (KeyError, IndexError, TypeError) as error:
            self._count("errors", 1)
            raise RolloutError(f"{self.purpose} {self.model} gave no message: {text_of(error)}") from None
        usage = EndpointUsage()
        usage.add(answer.get("usage"))
        self._count("calls", 1)
        self._count("tokens", usage.tokens)
        self._count("cost", usage.cost(self._limits))
        return text

    async def _post(self, messages: Chat, seed: int) -> Any:
        assert isinstance(self._backend, Endpoint)
        body: dict[str, Any] = {"messages": list(messages)}
        if self._temperature is not None:
            body |= {"temperature": self._temperature}
        if self._temperature:  # a seed means nothing to a model that does not sample
            body |= {"seed": seed % 2**31}
        if self._max_new_tokens is not None:
            body |= {"max_tokens": self._max_new_tokens}
        return await self._backend.post(body)

    async def _ask_host(self, messages: Chat, seed: int) -> Any:
        host = _host.get()
        if host is None:
            raise UnsupportedError("a model of this process is asked in a run; elsewhere, name an endpoint by base_url")
        name = self.model.removeprefix(LOCAL)
        tokens, temperature = self._max_new_tokens or _LOCAL_TOKENS, self._temperature or 0.0
        call = host.chat(name, messages, tokens, temperature, seed)
        return await self._backend.run(lambda: call, 0)

    def _count(self, what: str, amount: float) -> None:
        if (calls := _log.get()) is not None:
            calls.add(f"{self.purpose}/{what}", amount)


class _Cache:
    """Answers by content. A request that equals one in flight waits for its answer."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._in_flight: dict[str, asyncio.Future[str]] = {}
        if file is not None and file.is_file():
            self._answers |= {row["key"]: row["answer"] for row in read_jsonl(file) if {"key", "answer"} <= row.keys()}

    def __reduce__(self) -> Any:
        return type(self), (self._file,)

    async def get(self, key: str, read: Callable[[str], T], ask: Callable[[], Any], count: Callable[..., None]) -> T:
        if key in self._answers:
            count("cached", 1)
            return read(self._answers[key])
        asked = self._in_flight.get(key)
        if asked is not None and asked.get_loop() is asyncio.get_running_loop():
            answer = await asyncio.shield(asked)
            count("cached", 1)
            return read(answer)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs the exception
        self._in_flight[key] = future
        try:
            answer = await ask()
        except BaseException as error:
            ended = isinstance(error, asyncio.CancelledError)  # that of another task, for those who wait
            future.set_exception(RolloutError("the request was cancelled") if ended else error)
            raise
        finally:
            self._in_flight.pop(key, None)
        future.set_result(answer)
        self._answers[key] = answer
        if len(self._answers) > _MAX_CACHED:
            self._answers.popitem(last=False)
        if self._file is not None:
            append_jsonl(self._file, [{"key": key, "answer": answer}])
        return read(answer)
