"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from pydantic import Field

from palestra.core.errors import InputError, SettingError, UnsupportedError
from palestra.core.messages import call_to_dict, from_dict
from palestra.models.chat.streaming import Delta
from palestra.servers.gateway.request import ChatRequest, Event, function_tools, grammar_of, json_schema, openai_choice
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer
from palestra.servers.openai.openai_forms import ChatAnswer, Piece, PromptSize, chat_logprobs, response, usage
from palestra.servers.openai.sampling_fields import SamplingFields, short


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
        tools = function_tools(self.tools or ())
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
        size = PromptSize(answers[0].prompt_tokens, answers[0].cached_tokens)
        ids = list(answers[0].context_ids[: size.tokens])
        more = {"prompt_token_ids": ids} if self.return_token_ids else {}
        return response("chat.completion", model)(choices, usage=_usage(size, answers), **more)

    async def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]:
        chunk, answers, size = response("chat.completion.chunk", model), list[ChatAnswer](), PromptSize(0, 0)
        for i in range(self.choices):
            yield Event(chunk([_delta(i, {"role": "assistant", "content": ""})]))
        async for i, piece in pieces:
            if isinstance(piece, PromptSize):
                size = piece
            elif isinstance(piece, Delta):
                yield Event(chunk([_delta(i, {"reasoning_content" if piece.is_thinking else "content": piece.text})]))
            elif isinstance(piece, ChatAnswer):
                answers.append(piece)
                choice = self._choice(i, piece, model)
                for number, call in enumerate(choice.pop("message").get("tool_calls", ())):
                    yield Event(chunk([_delta(i, {"tool_calls": [{"index": number, **call}]})]))
                yield Event(chunk([{**choice, "delta": {}}]))
        if (self.stream_options or {}).get("include_usage"):
            yield Event(chunk([], usage=_usage(size, answers)))
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


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _usage(size: PromptSize, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    sampled = [answer.completion for answer in answers]
    return usage(size.tokens, sampled) | {"prompt_tokens_details": {"cached_tokens": size.cached}}
