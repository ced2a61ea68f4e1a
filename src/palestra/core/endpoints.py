"""Chat endpoints that cost something: limits on requests, tokens and money, and a count of what was used."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from palestra.core.errors import NotAllowedError, SettingError, refuse_arguments
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
        for name in [f.name for f in fields(cls)]:
            value = getattr(limits, name)
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
    _free_at: float = field(default=0.0, init=False)  # when the next one may begin
    _begun: bool = field(default=False, init=False)

    def wait_s(self, amount: float, now: float) -> float:
        """Reserve `amount` of the minute's quota; the seconds until it may be used."""
        if self.per_minute is None:
            return 0.0
        if not self._begun:  # a whole minute's quota is there at the start
            self._begun, self._free_at = True, now - _MINUTE_S
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
            taken = self.usage.tokens - before
            self._tokens.correct(taken - expected_tokens if taken else 0)
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
