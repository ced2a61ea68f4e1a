"""A model that helps: a judge, a simulated user, a reflector. An endpoint, a local model, or the policy itself.

What costs something has limits on requests, tokens and money, and a count of what was used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from palestra.core.errors import (
    NotAllowedError,
    PalestraError,
    RolloutError,
    SettingError,
    UnsupportedError,
    refuse_arguments,
    text_of,
)
from palestra.core.files import append_jsonl, read_jsonl
from palestra.core.http import ConcurrencyLimit, Request, Retries, ask_async

OPENAI_URL = "https://api.openai.com/v1"
_KINDS = ("prompt", "completion")
_CHARS_PER_TOKEN = 4  # a guess, until the answer says how many tokens it took
_MINUTE_S = 60.0


class BudgetSpent(NotAllowedError):
    """A model that may not be asked any more; raise its budget."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits on the requests to a model, their time and their cost. Prices are per million tokens."""

    max_concurrent: int = 16
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_calls: int | None = None
    max_tokens: int | None = None  # of prompts and answers together
    max_cost: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    timeout_s: float = 60.0  # for one answer
    attempts: int = 5  # at one request, while the endpoint answers 429, 5xx or not at all
    retry_pause_s: float = 1.0  # before the second attempt; twice as long before each further one

    @classmethod
    def of(cls, title: str, settings: Mapping[str, Any]) -> CallLimits:
        """From keyword arguments of the function `title`."""
        refuse_arguments(title, settings, [f.name for f in fields(cls)], {"at_once": "max_concurrent"})
        limits = cls(**settings)
        for name, value in asdict(limits).items():
            least = 1 if name in ("max_concurrent", "attempts") else 0
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            above = name.endswith("per_minute") or name == "timeout_s"
            if value is not None and (not is_number or value < least or (above and not value)):
                bound = "above 0" if above else f"of at least {least}"
                raise SettingError(f"{title}: {name}={value!r}; expected a number {bound}")
        if limits.max_cost is not None and not (limits.price_in or limits.price_out):
            raise SettingError(f"{title}: max_cost needs the prices of a million tokens, price_in and price_out")
        return limits


@dataclass(slots=True)
class EndpointUsage:
    """Requests to an endpoint so far, and the tokens that it reported."""

    requests: int = 0  # that were answered
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unreported: int = 0  # requests whose answer does not say how many tokens they took

    def add(self, usage: Any) -> None:
        prompt, completion = (usage.get(f"{kind}_tokens") if isinstance(usage, dict) else None for kind in _KINDS)
        self.requests += 1
        self.prompt_tokens += prompt if isinstance(prompt, int) else 0
        self.completion_tokens += completion if isinstance(completion, int) else 0
        self.unreported += not (isinstance(prompt, int) and isinstance(completion, int))

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def cost(self, limits: CallLimits) -> float:
        return (self.prompt_tokens * limits.price_in + self.completion_tokens * limits.price_out) / 1e6


@dataclass(slots=True)
class Pace:
    """Spreads requests over time: each takes its share of a minute, and a pause is not saved up beyond one minute."""

    per_minute: float | None
    _free_at: float = field(default=-math.inf, init=False)  # when the next one may begin; at first, a minute ago

    def wait_s(self, amount: float, now: float) -> float:
        """Reserve `amount` of the minute's quota; the seconds until it may be used."""
        if self.per_minute is None:
            return 0.0
        self._free_at = max(self._free_at, now - _MINUTE_S) + _MINUTE_S * amount / self.per_minute
        return max(0.0, self._free_at - now)

    def correct(self, amount: float) -> None:
        """Add the tokens that a request took beyond its reservation; a negative amount is returned to the quota."""
        if self.per_minute is not None:
            self._free_at += _MINUTE_S * amount / self.per_minute


class Budgeted:
    """Counts what is used, and waits or raises where the limits say so. Used in one event loop at a time."""

    def __init__(self, limits: CallLimits, what: str) -> None:
        self.limits = limits
        self.usage = EndpointUsage()
        self._what = what
        self._slots = ConcurrencyLimit(limits.max_concurrent)
        self._requests, self._tokens = Pace(limits.requests_per_minute), Pace(limits.tokens_per_minute)
        self._begun = 0

    def __reduce__(self) -> Any:
        return type(self), (self.limits, self._what)  # a copy in another process counts for itself

    @property
    def cost(self) -> float:
        return self.usage.cost(self.limits)

    async def run(self, call: Any, expected_tokens: int) -> Any:
        """The answer of `call()`, which has a `usage`, in a free slot and within the limits."""
        async with self._slots.slot():
            limits = self.limits
            for name, used, most in (
                ("max_calls", self._begun, limits.max_calls),
                ("max_tokens", self.usage.tokens, limits.max_tokens),
                ("max_cost", self.cost, limits.max_cost),
            ):
                if most is not None and used >= most:
                    raise BudgetSpent(f"the budget of {self._what} is spent: {used:g} of {name}={most:g}; raise {name}")
            self._begun += 1
            now = time.monotonic()
            wait_s = max(self._requests.wait_s(1, now), self._tokens.wait_s(expected_tokens, now))
            if wait_s:
                await asyncio.sleep(wait_s)
            answer = await call()
            before = self.usage.tokens
            self.usage.add(answer.get("usage") if isinstance(answer, dict) else None)
            if taken := self.usage.tokens - before:
                self._tokens.correct(taken - expected_tokens)
            return answer


class Endpoint(Budgeted):
    """An OpenAI-style endpoint. Without `base_url` it is OPENAI_BASE_URL, else api.openai.com."""

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        limits: CallLimits | None = None,
    ) -> None:
        super().__init__(limits or CallLimits(), f"the model {model!r}")
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL).rstrip("/")
        self.model, self.api_key_env = model, api_key_env

    def require_key(self) -> None:
        """PalestraError where OpenAI itself would be asked without a key."""
        if self.base_url == OPENAI_URL and not os.environ.get(self.api_key_env):
            raise SettingError(
                f"the model {self.model!r} needs the key of {OPENAI_URL} in the environment variable "
                f"{self.api_key_env}. Set it, name another endpoint (base_url='http://localhost:11434/v1'), or a model "
                f"of this machine ('local/{self.model}')."
            )

    def __reduce__(self) -> Any:
        return type(self), (self.model, self.base_url, self.api_key_env, self.limits)

    async def post(self, body: Mapping[str, Any]) -> Any:
        """The answer to a chat completion; HttpError when there is none after all attempts."""
        limits, url, key = self.limits, f"{self.base_url}/chat/completions", os.environ.get(self.api_key_env)
        request = Request(url, {"model": self.model, **body}, token=key, timeout_s=limits.timeout_s)
        retries = Retries(attempts=limits.attempts, pause_s=limits.retry_pause_s, backoff=2.0)
        expected = len(json.dumps(body.get("messages", ""), default=str)) // _CHARS_PER_TOKEN
        return await self.run(lambda: ask_async(request, retries), expected + int(body.get("max_tokens") or 0))


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
def _setting(variable: ContextVar[T | None], value: T) -> Iterator[T]:
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def hosting(host: Any) -> AbstractContextManager[Any]:
    """Let chat models in this context, and in tasks that are created in it, use `host`."""
    return _setting(_host, host)


@dataclass(slots=True)
class CallLog:
    """Counts of chat models' calls in one group, by their purpose."""

    counts: dict[str, float] = field(default_factory=dict)
    judges: set[str] = field(default_factory=set)  # names of the measures that asked a judge

    def add(self, name: str, amount: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + amount


_log: ContextVar[CallLog | None] = ContextVar("call_log", default=None)


def logging_calls() -> AbstractContextManager[CallLog]:
    """Count the calls of chat models in this context, and in tasks that are created in it."""
    return _setting(_log, CallLog())


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
        self._backend = Budgeted(self._limits, f"the model {model!r}")
        if base_url is not None or not is_local(model):
            self._backend = Endpoint(model, base_url, api_key_env, self._limits)
            self._backend.require_key()
        self._temperature, self._max_new_tokens = temperature, max_new_tokens
        changes = model == POLICY and not isinstance(self._backend, Endpoint)  # with every step
        self._cache = None
        if cache is not False and not changes:
            self._cache = _Cache(None if isinstance(cache, bool) else Path(cache))

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
            answer = await self._send(messages, seed)
            text = answer["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"its content is a {type(text).__name__}")
        except (PalestraError, KeyError, IndexError, TypeError) as error:
            self._count("errors", 1)
            if isinstance(error, BudgetSpent):
                raise
            if isinstance(error, PalestraError):
                raise RolloutError(f"{self.purpose} {self.model}: {error}") from None
            raise RolloutError(f"{self.purpose} {self.model} gave no message: {text_of(error)}") from None
        usage = EndpointUsage()
        usage.add(answer.get("usage"))
        self._count("calls", 1)
        self._count("tokens", usage.tokens)
        self._count("cost", usage.cost(self._limits))
        return text

    async def _send(self, messages: Chat, seed: int) -> Any:
        if not isinstance(self._backend, Endpoint):
            if (host := _host.get()) is None:
                raise UnsupportedError(
                    "a model of this process is asked in a run; elsewhere, name an endpoint by base_url"
                )
            tokens, temperature = self._max_new_tokens or _LOCAL_TOKENS, self._temperature or 0.0
            call = host.chat(self.model.removeprefix(LOCAL), messages, tokens, temperature, seed)
            return await self._backend.run(lambda: call, 0)
        body: dict[str, Any] = {"messages": list(messages)}
        if self._temperature is not None:
            body |= {"temperature": self._temperature}
        if self._temperature:  # a seed means nothing to a model that does not sample
            body |= {"seed": seed % 2**31}
        if self._max_new_tokens is not None:
            body |= {"max_tokens": self._max_new_tokens}
        return await self._backend.post(body)

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
