"""OpenAI's forms: completions and chat, whole and streamed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from palestra.chat.toolcalls import parse_assistant
from palestra.core.errors import PalestraError
from palestra.core.messages import from_dict
from palestra.core.types import Message, ToolCall
from palestra.serve.completer import Completer, Completion, SamplingRequest
from palestra.serve.sampling_fields import SamplingFields

_DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 1024


class CompletionBody(SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=1, description="only the sampled token's own logprob is known")
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    def requests(self, model: Completer) -> list[SamplingRequest]:
        many = isinstance(self.prompt, list) and bool(self.prompt) and not isinstance(self.prompt[0], int)
        prompts: list[Any] = self.prompt if many else [self.prompt]  # type: ignore[assignment]
        if len(prompts) > _MAX_PROMPTS:
            raise PalestraError(f"{len(prompts)} prompts at once; up to {_MAX_PROMPTS} are taken, send the rest apart")
        ids = [model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [model.request(prompt, self, _DEFAULT_COMPLETION_TOKENS) for prompt in ids]


class ChatBody(SamplingFields):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def tools_used(self) -> list[dict[str, Any]]:
        if self.tool_choice not in (None, "auto", "none"):
            raise PalestraError(f"tool_choice={self.tool_choice!r} is not supported by this server; use auto or none")
        return [] if self.tool_choice == "none" else [tool_schema(tool) for tool in self.tools or []]

    def request(self, model: Completer) -> SamplingRequest:
        tools = self.tools_used
        prompt = model.chat.prompt(self._messages(), tools)
        request = model.request(prompt.token_ids.tolist(), self, model.context_tokens)
        return replace(request, hold=model.chat.call_form.opens if tools else ())

    def _messages(self) -> list[Message]:
        try:
            return [from_dict(message) for message in self.messages]
        except (TypeError, AttributeError) as error:
            raise PalestraError(f"messages: not in the form of a chat ({error})") from None


def tool_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as prompts of a training show it, without what else clients send (`strict`)."""
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
    return ResponseFrame(kind, model.name, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))


def usage(requests: Sequence[SamplingRequest], completions: Sequence[Completion]) -> dict[str, int]:
    prompt = sum(len(request.prompt_ids) for request in requests)
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def text_choice(index: int, completion: Completion, model: Completer, with_logprobs: bool) -> dict[str, Any]:
    logprobs = text_logprobs(completion, model) if with_logprobs else None
    return {"index": index, "text": completion.text, "finish_reason": completion.finish, "logprobs": logprobs}


def text_logprobs(completion: Completion, model: Completer) -> dict[str, Any]:
    tokens = _token_texts(completion, model)
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    top = [{token: logprob} for token, logprob in zip(tokens, completion.logprobs, strict=True)]
    return {"tokens": tokens, "token_logprobs": list(completion.logprobs), "top_logprobs": top, "text_offset": offsets}


def chat_choice(
    index: int, completion: Completion, model: Completer, with_tools: bool, with_logprobs: bool
) -> dict[str, Any]:
    text, calls = read_reply(completion, model, with_tools)
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if calls:
        message["tool_calls"] = [call_dict(call) for call in calls]
    return {
        "index": index,
        "message": message,
        "finish_reason": "tool_calls" if calls and completion.finish == "stop" else completion.finish,
        "logprobs": chat_logprobs(completion, model) if with_logprobs else None,
    }


def chat_logprobs(completion: Completion, model: Completer) -> dict[str, Any]:
    rows = zip(_token_texts(completion, model), completion.logprobs, strict=True)
    content = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in rows]
    return {"content": content, "refusal": None}


def read_reply(completion: Completion, model: Completer, with_tools: bool) -> tuple[str, list[ToolCall]]:
    """The reply's text and the tool calls in it. Calls that cannot be read stay text."""
    if not with_tools:
        return completion.text, []
    text, calls = parse_assistant(completion.text, model.chat.call_form)
    good = [replace(call, id=f"call_{uuid.uuid4().hex[:16]}") for call in calls if call.error is None]
    return (text, good) if good else (completion.text, [])


def call_dict(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def last_chat_deltas(
    index: int, completion: Completion, sent: str, model: Completer, with_tools: bool, with_logprobs: bool
) -> Iterator[dict[str, Any]]:
    """The chunks that end a streamed choice: the text held back so far, the calls, and why it ended."""
    choice = chat_choice(index, completion, model, with_tools, with_logprobs)
    message = choice["message"]
    text = (message["content"] or "").lstrip() if with_tools else message["content"] or ""
    rest = text[len(sent) :] if text.startswith(sent) else ""
    calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
    if rest:
        yield {"index": index, "delta": {"content": rest}, "finish_reason": None}
    if calls:
        yield {"index": index, "delta": {"tool_calls": calls}, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}


def _token_texts(completion: Completion, model: Completer) -> list[str]:
    return [model.tokenizer.decode([i], skip_special_tokens=False) for i in completion.token_ids]
