"""OpenAI's Chat Completions."""

from __future__ import annotations

import marshal
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Self

from pydantic import Field

from palestra.core.errors import InputError, SettingError, UnsupportedError
from palestra.core.messages import call_to_dict, from_dict
from palestra.models.chat.streaming import Delta
from palestra.servers.gateway.request import (
    ChatAnswer,
    ChatRequest,
    Event,
    Piece,
    PromptSize,
    SamplingFields,
    function_tool,
    grammar_of,
    json_schema,
    openai_choice,
    short,
)
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer, Completion, decode


class ChatCompletionBody(SamplingFields):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, max_length=100)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Self:
        if raw.get("grammar") is not None:  # a field of palestra's own inference protocol, inherited
            raise UnsupportedError("grammar is not supported in chats; use tool_choice or response_format")
        return super().read(raw)

    def request(self, model: Completer) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise SettingError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        for i, message in enumerate(self.messages):
            if message.get("content") is None and not message.get("tool_calls"):
                raise InputError(f"messages.{i}: a message of {short(message.get('role'))} needs content")
        try:
            messages = tuple(map(from_dict, self.messages))
        except (TypeError, AttributeError) as error:
            raise InputError(f"messages: not in the form of a chat ({error})") from None
        tools = _function_tools(marshal.dumps(self.tools, 2)) if self.tools else ()  # the same ones come every time
        schema = json_schema(self.response_format, "response_format")
        choice = openai_choice(self.tool_choice, self.parallel_tool_calls)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        variables = {**(self.chat_template_kwargs or {}), **effort}
        return ChatRequest(
            messages,
            self,
            tools,
            variables,
            reads_calls=choice.mode != "none",
            grammar=grammar_of(model, tools, choice, schema, variables),
            top_logprobs=self.top_logprobs or 0,
        )

    def response(self, answers: Sequence[ChatAnswer], model: Completer) -> dict[str, Any]:
        choices = [self._choice(i, answer, model) for i, answer in enumerate(answers)]
        size = answers[0].size
        used = usage(size.tokens, (answer.completion for answer in answers), size.cached)
        more = {"prompt_token_ids": list(answers[0].context_ids[: size.tokens])} if self.return_token_ids else {}
        return response("chat.completion", model)(choices, usage=used, **more)

    async def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]:
        chunk, ended, size = response("chat.completion.chunk", model), list[Completion](), PromptSize(0, 0)
        for i in range(self.choices):
            yield Event(chunk([_delta(i, {"role": "assistant", "content": ""})]))
        async for i, piece in pieces:
            if isinstance(piece, PromptSize):
                size = piece
            elif isinstance(piece, Delta):
                yield Event(chunk([_delta(i, {"reasoning_content" if piece.is_thinking else "content": piece.text})]))
            elif isinstance(piece, ChatAnswer):
                ended.append(piece.completion)
                choice = self._choice(i, piece, model)
                for number, call in enumerate(choice.pop("message").get("tool_calls", ())):
                    yield Event(chunk([_delta(i, {"tool_calls": [{"index": number, **call}]})]))
                yield Event(chunk([{**choice, "delta": {}}]))
        if (self.stream_options or {}).get("include_usage"):
            yield Event(chunk([], usage=usage(size.tokens, ended, size.cached)))
        yield Event("[DONE]")

    def _choice(self, index: int, answer: ChatAnswer, model: Completer) -> dict[str, Any]:
        text, calls, completion = answer.message.text, answer.message.tool_calls, answer.completion
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if calls:
            message["tool_calls"] = [call_to_dict(call) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls and completion.finish == "stop" else completion.finish,
            "logprobs": chat_logprobs(completion, model) if self.logprobs else None,
        }
        return choice | ({"token_ids": completion.token_ids} if self.return_token_ids else {})


@lru_cache(64)
def _function_tools(marshalled: bytes) -> tuple[dict[str, Any], ...]:
    return tuple(map(function_tool, marshal.loads(marshalled)))


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def response(kind: str, model: Completer) -> Callable[..., dict[str, Any]]:
    """A function that adds `choices` to the fields that all chunks of one response have in common.

    `kind` is chat.completion, chat.completion.chunk or text_completion.
    """
    response_id = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{secrets.token_hex(16)}"
    about = {"id": response_id, "object": kind, "created": int(time.time()), "model": model.name}
    return lambda choices, **more: {**about, "choices": list(choices), **more}


def usage(prompt: int, completions: Iterable[Completion], cached: int | None = None) -> dict[str, Any]:
    """The `usage` of a response; `prompt` is the number of the prompts' tokens, of which `cached` were known."""
    sampled = sum(len(completion.token_ids) for completion in completions)
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled, **details}


def chat_logprobs(completion: Completion, model: Completer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token, model)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    top = completion.top or [[] for _ in completion.token_ids]
    content = [
        entry(token, logprob) | {"top_logprobs": [entry(i, value) for i, value in pairs]}
        for token, logprob, pairs in zip(completion.token_ids, completion.logprobs, top, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_text(token: int, model: Completer) -> str:
    """The token's text, or its name in the vocabulary if it is only part of a character."""
    text = decode(model.tokenizer, [token])
    return text if "\ufffd" not in text else str(model.tokenizer.convert_ids_to_tokens(token))
