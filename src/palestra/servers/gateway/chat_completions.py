"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from palestra.core.errors import PalestraError
from palestra.servers.gateway.request import (
    Answer,
    ChatRequest,
    Delta,
    Event,
    Piece,
    PromptSize,
    function_tools,
    grammar_of,
    json_schema,
    openai_choice,
)
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.openai_forms import ChatBody, ResponseFrame, response
from palestra.servers.openai.sampling_fields import known_fields


class ChatCompletionBody(ChatBody):
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    @classmethod
    def read(cls, raw: dict[str, Any]) -> ChatCompletionBody:
        if raw.get("grammar") is not None:  # a field of palestra's own inference protocol, inherited from ChatBody
            raise PalestraError("grammar is not supported by the gateway; use tool_choice or response_format")
        return cls.model_validate(known_fields(cls, raw))

    def request(self, model: Completer) -> ChatRequest:
        self.check_logprobs()
        tools = function_tools(self.tools or ())
        schema = json_schema(self.response_format, "response_format")
        choice = openai_choice(self.tool_choice, self.parallel_tool_calls)
        return ChatRequest(
            tuple(self.read_messages()),
            self,
            tools,
            self.variables,
            reads_calls=choice.mode != "none",
            grammar=grammar_of(model, tools, choice, schema, self.variables),
            top_logprobs=self.top_logprobs or 0,
        )

    def response(self, answers: Sequence[Answer], model: Completer) -> dict[str, Any]:
        choices = [self._choice(i, answer, model) for i, answer in enumerate(answers)]
        size = PromptSize(answers[0].prompt_tokens, answers[0].cached_tokens)
        return response("chat.completion", model)(choices, usage=_usage(size, answers))

    async def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]:
        chunk, answers, size = response("chat.completion.chunk", model), list[Answer](), PromptSize(0, 0)
        for i in range(self.choices):
            yield Event(chunk([_delta(i, {"role": "assistant", "content": ""})]))
        async for i, piece in pieces:
            if isinstance(piece, PromptSize):
                size = piece
            elif isinstance(piece, Delta):
                yield Event(chunk([_delta(i, {"reasoning_content" if piece.is_thinking else "content": piece.text})]))
            elif isinstance(piece, Answer):
                answers.append(piece)
                for event in self._end(i, piece, chunk, model):
                    yield event
        if (self.stream_options or {}).get("include_usage"):
            yield Event(chunk([], usage=_usage(size, answers)))
        yield Event("[DONE]")

    def _end(self, index: int, answer: Answer, chunk: ResponseFrame, model: Completer) -> list[Event]:
        """The calls one by one, then why the choice ended."""
        choice = self._choice(index, answer, model)
        calls = choice.pop("message").get("tool_calls", ())
        deltas = [_delta(index, {"tool_calls": [{"index": i, **call}]}) for i, call in enumerate(calls)]
        return [Event(chunk([each])) for each in [*deltas, {**choice, "delta": {}}]]

    def _choice(self, index: int, answer: Answer, model: Completer) -> dict[str, Any]:
        said = answer.message
        return self.choice_of(index, answer.completion, model, said.text, said.tool_calls, answer.thinking)


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def _usage(size: PromptSize, answers: Sequence[Answer]) -> dict[str, Any]:
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": size.tokens,
        "completion_tokens": sampled,
        "total_tokens": size.tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": size.cached},
    }
