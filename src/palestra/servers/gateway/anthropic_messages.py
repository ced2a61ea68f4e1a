"""Anthropic's Messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from palestra.core.errors import InputError, UnsupportedError
from palestra.core.types import Message, ToolCall
from palestra.models.chat.streaming import Delta
from palestra.servers.gateway.request import (
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ChatAnswer,
    ChatRequest,
    Event,
    Piece,
    PromptSize,
    RequestForm,
    SamplingFields,
    ToolChoice,
    grammar_of,
    json_schema,
    short,
)
from palestra.servers.openai.completer import Completer

STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class CountBody(RequestForm):
    """The fields that count as input."""

    tool_kind: ClassVar[str] = "custom"

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def request(self, model: Completer) -> ChatRequest:
        return ChatRequest(tuple(self._messages()), SamplingFields(), tuple(map(_tool, self.tools or ())))

    def _messages(self) -> Iterator[Message]:
        if self.system:
            yield Message("system", _text(self.system, "system"))
        for i, message in enumerate(self.messages):
            where, content, role = f"messages.{i}", message.get("content"), message.get("role")
            if role not in ("user", "assistant", "system"):
                raise InputError(f"{where}.role is {short(role)}; expected user, assistant or system")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
                raise InputError(f"{where}.content is {short(content)}; expected a text or a list of blocks")
            if role == "system":  # Claude Code sends some between the user's messages
                yield Message("system", _text(blocks, where))
            else:
                yield from _user(blocks, where) if role == "user" else [_assistant(blocks, where)]
        if self.messages[-1].get("role") == "assistant":
            raise UnsupportedError("the last message is the assistant's; prefilled answers are not supported")


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    stream: bool | None = None

    def request(self, model: Completer) -> ChatRequest:
        choice = _choice(self.tool_choice)
        schema = json_schema((self.output_config or {}).get("format"), "output_config.format")
        names = ("max_tokens", "temperature", "top_p", "top_k")
        plain = super().request(model)
        return replace(
            plain,
            fields=SamplingFields(**{name: getattr(self, name) for name in names}),
            reads_calls=choice.mode != "none",
            grammar=grammar_of(model, plain.tools, choice, schema, {}),
            stop=tuple(text for text in self.stop_sequences or () if text),
        )

    def response(self, answers: Sequence[ChatAnswer], model: Completer) -> dict[str, Any]:
        (answer,) = answers
        content = [block for block, _ in self._blocks(answer)]
        return _message(model, content, answer.size, len(answer.completion.token_ids)) | _stop(answer)

    async def events(self, pieces: AsyncIterator[Piece], model: Completer) -> AsyncIterator[Event]:
        blocks = _BlockEvents()
        async for _, piece in pieces:
            if isinstance(piece, PromptSize):
                yield _event("message_start", message=_message(model, [], piece, 0))
            elif isinstance(piece, Delta) and (self._shows_thinking or not piece.is_thinking):
                kind = "thinking" if piece.is_thinking else "text"
                for event in blocks.more(kind, piece.text):
                    yield event
            elif isinstance(piece, ChatAnswer):
                for event in blocks.end(self._blocks(piece)):
                    yield event
                used = {"output_tokens": len(piece.completion.token_ids)}
                yield _event("message_delta", delta=_stop(piece), usage=used)
                yield _event("message_stop")

    @property
    def _shows_thinking(self) -> bool:
        return (self.thinking or {}).get("type") in ("enabled", "adaptive")

    def _blocks(self, answer: ChatAnswer) -> Iterator[tuple[dict[str, Any], str]]:
        """The blocks of an answer, each with the text that a stream sends of it."""
        text, calls = answer.message.text, answer.message.tool_calls
        if answer.thinking and self._shows_thinking:
            yield {"type": "thinking", "thinking": answer.thinking, "signature": ""}, answer.thinking
        if text or not calls:
            yield {"type": "text", "text": text}, text
        for call in calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
            yield block, json.dumps(call.arguments, ensure_ascii=False)


@dataclass(slots=True)
class _BlockEvents:
    """Content blocks as events, one after the other."""

    _kinds: list[str] = field(default_factory=list)
    _is_open: bool = False

    def more(self, kind: str, text: str) -> Iterator[Event]:
        """Text of the block that is open, or of a new one."""
        if not self._is_open or self._kinds[-1] != kind:
            yield from self._start({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        yield self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def end(self, blocks: Iterator[tuple[dict[str, Any], str]]) -> Iterator[Event]:
        """The blocks that were not streamed yet: tool calls, and an empty text."""
        for block, text in blocks:
            if block["type"] == "tool_use":
                yield from self._start({**block, "input": {}})
                yield self._event("content_block_delta", delta={"type": "input_json_delta", "partial_json": text})
            elif block["type"] not in self._kinds:
                yield from self._start(block)
        yield from self._stop()

    def _start(self, block: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._stop()
        self._kinds.append(block["type"])
        self._is_open = True
        yield self._event("content_block_start", content_block=block)

    def _stop(self) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            yield self._event("content_block_stop")

    def _event(self, name: str, **more: Any) -> Event:
        return _event(name, index=len(self._kinds) - 1, **more)


def _event(name: str, **fields: Any) -> Event:
    return Event({"type": name, **fields}, name)


def _message(model: Completer, content: list[dict[str, Any]], size: PromptSize, sampled: int) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model.name,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": size.tokens - size.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": size.cached,
            "output_tokens": sampled,
        },
    }


def _stop(answer: ChatAnswer) -> dict[str, Any]:
    reason: Literal["max_tokens", "stop_sequence", "tool_use", "end_turn"] = "end_turn"
    if answer.is_cut_off:
        reason = "max_tokens"
    elif answer.message.tool_calls:
        reason = "tool_use"
    elif answer.stop_text is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text}


def _user(blocks: Sequence[dict[str, Any]], where: str) -> Iterator[Message]:
    """The results of tools, each a message, and the text as one."""
    texts = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield Message("tool", _text(block.get("content"), where), tool_call_id=block.get("tool_use_id"))
        else:
            texts.append(_text([block], where))
    if texts or not blocks:
        yield Message("user", "".join(texts))


def _assistant(blocks: Sequence[dict[str, Any]], where: str) -> Message:
    visible = [block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking")]
    uses = [block for block in visible if block.get("type") == "tool_use"]
    for block in uses:
        if not (isinstance(block.get("name"), str) and isinstance(block.get("input"), dict)):
            raise InputError(f"{where}: a tool_use block needs a name and an input object")
    calls = tuple(ToolCall(str(block.get("id")), block["name"], block["input"]) for block in uses)
    return Message("assistant", _text([block for block in visible if block not in uses], where), calls)


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for block in content:
        text = block.get("text") if isinstance(block, dict) else None
        if not isinstance(text, str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise UnsupportedError(f"{where}: a block of type {short(kind)} is not supported here; only text is")
        texts.append(text)
    return "".join(texts)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise UnsupportedError(
            f"the tool {short(tool.get('type'))} is not supported; only custom tools with a name are"
        )
    about = {"description": tool["description"]} if "description" in tool else {}
    function = {"name": tool["name"], **about, "parameters": tool.get("input_schema") or {}}
    return {"type": "function", "function": function}


def _choice(value: dict[str, Any] | None) -> ToolChoice:
    kind = (value or {}).get("type", "auto")
    one_call = bool((value or {}).get("disable_parallel_tool_use"))
    if kind == "tool" and value is not None:
        return ToolChoice("required", (str(value.get("name")),), one_call)
    if kind not in ("auto", "any", "none"):
        raise UnsupportedError(f"tool_choice={short(value)} is not supported; use auto, any, none or tool with a name")
    return ToolChoice("required" if kind == "any" else kind, one_call=one_call)
