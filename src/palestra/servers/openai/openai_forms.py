"""OpenAI's forms: completions and chat, whole and streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pydantic import Field

from palestra.core.errors import PalestraError
from palestra.core.messages import call_to_dict, from_dict
from palestra.core.types import Message
from palestra.models.chat.streaming import Delta
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer, Completion, SamplingRequest, decode
from palestra.servers.openai.sampling_fields import Prompts, SamplingFields, TokenIds, short

_DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One assistant message with its tokens."""

    message: Message  # its calls have the ids that the client knows
    thinking: str
    completion: Completion
    prompt_tokens: int
    cached_tokens: int = 0
    context_ids: Sequence[int] = ()  # the tokens of its session, of which the prompt's come first

    @property
    def is_cut_off(self) -> bool:
        return self.completion.finish != "stop"

    @property
    def stop_text(self) -> str | None:
        """The stop sequence that ended it, if one did."""
        return self.completion.matched if isinstance(self.completion.matched, str) else None


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Number of prompt tokens, and how many of them were computed before."""

    tokens: int
    cached: int


Piece = tuple[int, "PromptSize | Delta | ChatAnswer | None"]  # of a stream: the choice, and what comes


class CompletionBody(SamplingFields):
    prompt: str | Prompts[str] | TokenIds | Prompts[TokenIds]
    max_tokens: int | None = Field(None, ge=0, description="0 with echo: the prompt's logprobs and no more")
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    def requests(self, model: Completer) -> list[SamplingRequest]:
        if self.max_tokens == 0 and not self.echo:
            raise PalestraError("max_tokens=0 samples nothing; use 1 or more, or echo=true")
        if self.stream and (self.echo or self.is_batch):
            raise PalestraError("streaming takes one prompt at a time, without echo; send the prompts apart")
        prompts: list[Any] = self.prompt if self.is_batch else [self.prompt]  # type: ignore[assignment]
        requests = [self._scored(request) for request in model.requests(prompts, self, _DEFAULT_COMPLETION_TOKENS)]
        for request in requests:
            model.check_scoring(request)
        return requests

    @property
    def is_batch(self) -> bool:
        return isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)

    def _scored(self, request: SamplingRequest) -> SamplingRequest:
        params = replace(request.params, max_new_tokens=0) if self.max_tokens == 0 else request.params
        scores_prompt = bool(self.echo) and self.logprobs is not None
        return replace(request, params=params, top_logprobs=self.logprobs or 0, scores_prompt=scores_prompt)

    def choice(self, index: int, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        prompt_ids = request.prompt_ids if self.echo else ()
        logprobs = text_logprobs(prompt_ids, completion, model) if self.logprobs is not None else None
        text = decode(model.tokenizer, prompt_ids) + completion.text
        choice = {"index": index, "text": text, "finish_reason": completion.finish, "logprobs": logprobs}
        if self.return_token_ids:
            choice |= {"prompt_token_ids": list(request.prompt_ids), "token_ids": completion.token_ids}
        return choice


class ChatBody(SamplingFields):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(None, max_length=100)
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**(self.chat_template_kwargs or {}), **effort}

    def check_logprobs(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise PalestraError(f"top_logprobs={self.top_logprobs} needs logprobs=true")

    def read_messages(self) -> list[Message]:
        for i, message in enumerate(self.messages):
            if message.get("content") is None and not message.get("tool_calls"):
                raise PalestraError(f"messages.{i}: a message of {short(message.get('role'))} needs content")
        try:
            return [from_dict(message) for message in self.messages]
        except (TypeError, AttributeError) as error:
            raise PalestraError(f"messages: not in the form of a chat ({error})") from None

    def response(self, answers: Sequence[ChatAnswer], model: Completer) -> dict[str, Any]:
        choices = [self._choice(i, answer, model) for i, answer in enumerate(answers)]
        size = PromptSize(answers[0].prompt_tokens, answers[0].cached_tokens)
        ids = list(answers[0].context_ids[: size.tokens])
        more = {"prompt_token_ids": ids} if self.return_token_ids else {}
        return response("chat.completion", model)(choices, usage=_chat_usage(size, answers), **more)

    async def chunks(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed response."""
        chunk, answers, size = response("chat.completion.chunk", model), list[ChatAnswer](), PromptSize(0, 0)
        for i in range(self.choices):
            yield chunk([_delta(i, {"role": "assistant", "content": ""})])
        async for i, piece in pieces:
            if isinstance(piece, PromptSize):
                size = piece
            elif isinstance(piece, Delta):
                yield chunk([_delta(i, {"reasoning_content" if piece.is_thinking else "content": piece.text})])
            elif isinstance(piece, ChatAnswer):
                answers.append(piece)
                choice = self._choice(i, piece, model)
                for number, call in enumerate(choice.pop("message").get("tool_calls", ())):
                    yield chunk([_delta(i, {"tool_calls": [{"index": number, **call}]})])
                yield chunk([{**choice, "delta": {}}])
        if (self.stream_options or {}).get("include_usage"):
            yield chunk([], usage=_chat_usage(size, answers))

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


def tool_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as training prompts show it, without other keys of clients (`strict`)."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return tool
    fields = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": fields}


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """The fields that every chunk of one response has in common."""

    kind: str  # chat.completion, chat.completion.chunk or text_completion
    model: str
    id: str
    created: int

    def __call__(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        about = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**about, "choices": list(choices), **more}


def response(kind: str, model: Completer) -> ResponseFrame:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return ResponseFrame(kind, model.name, f"{prefix}-{secrets.token_hex(16)}", int(time.time()))


def usage(requests: Sequence[SamplingRequest], completions: Sequence[Completion]) -> dict[str, int]:
    prompt = sum(len(request.prompt_ids) for request in requests)
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def text_logprobs(prompt_ids: Sequence[int], completion: Completion, model: Completer) -> dict[str, Any]:
    """The tokens of prompt (where it is echoed) and completion. Nothing predicts the prompt's first token."""
    ids = [*prompt_ids, *completion.token_ids]
    logprobs: list[float | None] = [*completion.logprobs]
    top: list[Any] = completion.top or [[] for _ in completion.token_ids]
    if prompt_ids and completion.prompt is not None:
        logprobs = [None, *completion.prompt.logprobs, *logprobs]
        top = [None, *completion.prompt.top, *top]
    texts = [token_text(i, model) for i in ids]
    named = [
        None if pairs is None else {token_text(i, model): value for i, value in pairs} | {text: logprob}
        for pairs, text, logprob in zip(top, texts, logprobs, strict=True)
    ]
    offsets = list(accumulate(map(len, texts), initial=0))[:-1]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": named, "text_offset": offsets}


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


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _chat_usage(size: PromptSize, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": size.tokens,
        "completion_tokens": sampled,
        "total_tokens": size.tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": size.cached},
    }
