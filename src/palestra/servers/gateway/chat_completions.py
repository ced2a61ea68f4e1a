"""OpenAI's Chat Completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from palestra.core.errors import PalestraError
from palestra.servers.gateway.request import ChatRequest, Event, function_tools, grammar_of, json_schema, openai_choice
from palestra.servers.openai.completer import Completer
from palestra.servers.openai.openai_forms import ChatBody, Piece
from palestra.servers.openai.sampling_fields import known_fields


class ChatCompletionBody(ChatBody):
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    @classmethod
    def read(cls, raw: dict[str, Any]) -> ChatCompletionBody:
        if raw.get("grammar") is not None:  # a field of palestra's own inference protocol, inherited from ChatBody
            raise PalestraError("grammar is not supported in chats; use tool_choice or response_format")
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

    async def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]:
        async for chunk in self.chunks(pieces, model):
            yield Event(chunk)
        yield Event("[DONE]")
