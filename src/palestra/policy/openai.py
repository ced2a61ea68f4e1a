"""Any OpenAI-style chat endpoint: messages in, one message out. Without token ids it can be scored, not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, ValidationError

from palestra.core.chat_model import CallLimits, Endpoint, EndpointUsage
from palestra.core.config import explain
from palestra.core.config_sections import Section
from palestra.core.errors import PalestraError, RolloutError, SettingError
from palestra.core.http import HttpError
from palestra.core.messages import from_dict, to_dict
from palestra.core.types import Finish, Message, SamplingParams, Turn

_OTHER_NAMES = {"timeout": "timeout_s", "num_max_requests_at_once": "max_concurrent"}
_NO_KEYS = ("", "none", "x", "empty")  # what is written where no key is needed
_ATTEMPTS = 3
_CHARACTERS_PER_TOKEN = 4  # a guess, for endpoints that do not say how many tokens they sampled


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
            raise SettingError("openai.server_type: an environment of ours asks OpenAI-style endpoints; leave it out")
        if str(settings.pop("health_check", False)).lower() != "false":
            raise SettingError("openai.health_check: the endpoint is asked without a check; leave it out")
        if str(settings.get("api_key", "")).lower() in _NO_KEYS:
            settings.pop("api_key", None)
        if "api_key" in settings:
            raise SettingError(
                "openai.api_key: a key on the command line or in a file is seen by others. Put it into an environment "
                "variable, and give the variable's name as openai.api_key_env (OPENAI_API_KEY unless given)"
            )
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise SettingError(f"openai: {explain(error, list(cls.model_fields))}") from None


class OpenAIChat:
    """A chat endpoint that is asked for one assistant message at a time."""

    def __init__(self, settings: OpenAISettings) -> None:
        self.settings = settings
        limits = CallLimits(settings.max_concurrent, timeout_s=settings.timeout_s, attempts=_ATTEMPTS)
        self._endpoint = Endpoint(settings.model_name, settings.base_url, settings.api_key_env, limits)

    @property
    def usage(self) -> EndpointUsage:
        return self._endpoint.usage

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], sampling: SamplingParams
    ) -> tuple[Message, Finish, int | None]:
        """The next assistant message, why it ended, and its tokens; RolloutError when the endpoint gives none."""
        body: dict[str, Any] = {
            "messages": [to_dict(m, arguments_as_text=True) for m in messages],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed % 2**31,
        }
        if tools:
            body["tools"] = list(tools)
        try:
            answer = await self._endpoint.post(body)
        except HttpError as error:
            raise RolloutError(str(error)) from None
        try:
            choice = answer["choices"][0]
            message = from_dict({**choice["message"], "role": "assistant"})
        except (KeyError, IndexError, TypeError, PalestraError) as error:
            raise RolloutError(f"{self._endpoint.base_url} gave no message: {type(error).__name__}: {error}") from None
        tokens = (answer.get("usage") or {}).get("completion_tokens")
        finish: Finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return message, finish, tokens if isinstance(tokens, int) else None


class EndpointSpeaker:
    """One conversation with an endpoint. Without token ids its attempts can be scored, not trained."""

    def __init__(self, endpoint: OpenAIChat, messages: Sequence[Message], tools: Sequence[dict[str, object]]) -> None:
        self.turns: list[Turn] = []
        self.sampled_tokens = 0
        self.shows_call_ids = False
        self._endpoint = endpoint
        self._messages = list(messages)
        self._tools = tools

    async def generate(self, sampling: SamplingParams) -> tuple[Message, Finish]:
        message, finish, tokens = await self._endpoint.complete(self._messages, self._tools, sampling)
        self._messages.append(message)
        written = len(message.text) + sum(len(str(call.arguments)) for call in message.tool_calls)
        self.sampled_tokens += tokens if tokens is not None else 1 + written // _CHARACTERS_PER_TOKEN
        return message, finish

    def append_replies(self, messages: Sequence[Message]) -> None:
        self._messages += messages

    def length_with(self, replies: Sequence[Message]) -> int:
        return sum(len(message.text) for message in (*self._messages, *replies)) // _CHARACTERS_PER_TOKEN

    def restart(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)

    def close(self) -> None:
        """The endpoint keeps no state."""
