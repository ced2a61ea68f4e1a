"""OpenAI's Chat Completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from palestra.core.errors import PalestraError
from palestra.gateway.request import Answer, ChatRequest
from palestra.serve.completer import Completer
from palestra.serve.openai_forms import ChatBody, call_dict, chat_logprobs, tool_schema
from palestra.serve.sampling_fields import known_fields, short


class ChatCompletionBody(ChatBody):
    @classmethod
    def read(cls, raw: dict[str, Any]) -> ChatCompletionBody:
        return cls.model_validate(known_fields(cls, raw))

    def request(self, model: Completer) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise PalestraError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        if self.tool_choice not in (None, "auto", "none"):
            raise PalestraError(f"tool_choice={short(self.tool_choice)} is not supported; use auto or none")
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return ChatRequest(
            tuple(self.read_messages()),
            self,
            tuple(tool_schema(tool) for tool in self.tools or ()),
            variables,
            reads_calls=self.tool_choice != "none",
            top_logprobs=self.top_logprobs or 0,
        )

    def response(self, answers: Sequence[Answer], model: Completer) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model.name,
            "choices": [self._choice(i, answer, model) for i, answer in enumerate(answers)],
            "usage": usage(answers),
        }

    def _choice(self, index: int, answer: Answer, model: Completer) -> dict[str, Any]:
        text, calls = answer.message.text, answer.message.tool_calls
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if calls:
            message["tool_calls"] = [call_dict(call) for call in calls]
        choice = {
            "index": index,
            "message": message,
            "finish_reason": finish_reason(answer),
            "logprobs": chat_logprobs(answer.completion, model) if self.logprobs else None,
        }
        return choice | ({"token_ids": answer.completion.token_ids} if self.return_token_ids else {})


def finish_reason(answer: Answer) -> str:
    if answer.is_cut_off:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """All choices have the same prompt."""
    prompt = answers[0].prompt_tokens
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }
