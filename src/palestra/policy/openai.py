"""Any OpenAI-style chat endpoint: messages in, one message out. Without token ids it can be scored, not trained."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from palestra.core.config import explain
from palestra.core.config_sections import Section
from palestra.core.errors import PalestraError, RolloutError
from palestra.core.http import ConcurrencyLimit, HttpError, Request, Retries, ask_async
from palestra.core.messages import from_dict, to_dict
from palestra.core.types import Finish, Message, SamplingParams

_OTHER_NAMES = {"timeout": "timeout_s", "num_max_requests_at_once": "max_concurrent"}
_NO_KEYS = ("", "none", "x", "empty")  # what is written where no key is needed
_KINDS = ("prompt", "completion")
_RETRIES = Retries(attempts=3, backoff=2.0)


class OpenAISettings(Section):
    """Where the endpoint is, and which model to ask. The key itself stays in the environment."""

    model_name: str = Field(description="the model's name at the endpoint")
    base_url: str = Field("https://api.openai.com/v1", description="up to and including /v1")
    api_key_env: str = Field("OPENAI_API_KEY", description="the environment variable that holds the key")
    timeout_s: float = Field(120.0, gt=0, description="for one answer")
    max_concurrent: int = Field(16, ge=1, description="requests in flight at once")

    @classmethod
    def read(cls, settings: dict[str, Any]) -> OpenAISettings:
        """From settings by our names or by those of atroposlib's servers; one that would have no effect is refused."""
        settings = {_OTHER_NAMES.get(name, name): value for name, value in settings.items()}
        if settings.pop("server_type", "openai") != "openai":
            raise PalestraError("openai.server_type: an environment of ours asks OpenAI-style endpoints; leave it out")
        if str(settings.pop("health_check", False)).lower() != "false":
            raise PalestraError("openai.health_check: the endpoint is asked without a check; leave it out")
        if str(settings.get("api_key", "")).lower() in _NO_KEYS:
            settings.pop("api_key", None)
        if "api_key" in settings:
            raise PalestraError(
                "openai.api_key: a key on the command line or in a file is seen by others. Put it into an environment "
                "variable, and give the variable's name as openai.api_key_env (OPENAI_API_KEY unless given)"
            )
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise PalestraError(f"openai: {explain(error, list(cls.model_fields))}") from None


@dataclass(slots=True)
class EndpointUsage:
    """What an endpoint has been asked so far, and the tokens that it reported."""

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


class OpenAIChat:
    """A chat endpoint that is asked for one assistant message at a time."""

    def __init__(self, settings: OpenAISettings) -> None:
        self.settings = settings
        self.usage = EndpointUsage()
        self._url = f"{settings.base_url.rstrip('/')}/chat/completions"
        self._limit = ConcurrencyLimit(settings.max_concurrent)

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], sampling: SamplingParams
    ) -> tuple[Message, Finish, int | None]:
        """The next assistant message, why it ended, and its tokens; RolloutError when the endpoint gives none."""
        body: dict[str, Any] = {
            "model": self.settings.model_name,
            "messages": [to_dict(m, arguments_as_text=True) for m in messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,
        }
        if tools:
            body["tools"] = list(tools)
        token = os.environ.get(self.settings.api_key_env)
        try:
            async with self._limit.slot():
                request = Request(self._url, body, token=token, timeout_s=self.settings.timeout_s)
                answer = await ask_async(request, _RETRIES)
        except HttpError as error:
            raise RolloutError(str(error)) from None
        self.usage.add(answer.get("usage") if isinstance(answer, dict) else None)
        try:
            choice = answer["choices"][0]
            message = from_dict({**choice["message"], "role": "assistant"})
        except (KeyError, IndexError, TypeError, PalestraError) as error:
            raise RolloutError(f"{self._url} gave no message: {type(error).__name__}: {error}") from None
        tokens = (answer.get("usage") or {}).get("completion_tokens")
        finish: Finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return message, finish, tokens if isinstance(tokens, int) else None
