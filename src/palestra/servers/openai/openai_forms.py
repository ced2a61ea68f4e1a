"""The forms of `/v1/completions` and `/generate`, and what the chat dialects share with them."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from pydantic import Field

from palestra.core.errors import SettingError
from palestra.core.types import Message
from palestra.models.chat.streaming import Delta
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer, Completion, SamplingRequest, decode
from palestra.servers.openai.sampling_fields import Prompts, RequestForm, SamplingFields, TokenIds, is_batch

_DEFAULT_COMPLETION_TOKENS, _SGLANG_NEW_TOKENS = 16, 128


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
            raise SettingError("max_tokens=0 samples nothing; use 1 or more, or echo=true")
        several = is_batch(self.prompt)
        if self.stream and (self.echo or several):
            raise SettingError("streaming takes one prompt at a time, without echo; send the prompts apart")
        prompts: list[Any] = self.prompt if several else [self.prompt]  # type: ignore[assignment]
        scoring = {"top_logprobs": self.logprobs or 0, "scores_prompt": bool(self.echo) and self.logprobs is not None}
        requests = model.requests(prompts, self, _DEFAULT_COMPLETION_TOKENS, **scoring)
        if self.max_tokens == 0:
            return [replace(request, params=replace(request.params, max_new_tokens=0)) for request in requests]
        return requests

    def choice(self, index: int, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        prompt_ids = request.prompt_ids if self.echo else ()
        logprobs = text_logprobs(prompt_ids, completion, model) if self.logprobs is not None else None
        text = decode(model.tokenizer, prompt_ids) + completion.text
        choice = {"index": index, "text": text, "finish_reason": completion.finish, "logprobs": logprobs}
        if self.return_token_ids:
            choice |= {"prompt_token_ids": list(request.prompt_ids), "token_ids": completion.token_ids}
        return choice


class SglangBody(RequestForm):
    """SGLang's `/generate`: `input_ids` or `text`, one or several; sampling in a field of its own."""

    input_ids: TokenIds | Prompts[TokenIds] | None = None
    text: str | Prompts[str] | None = None
    sampling_params: SamplingFields = Field(default_factory=SamplingFields)
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    logprob_start_len: int | None = Field(None, ge=-1, description="-1: no logprobs of the prompt")
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool = False

    @property
    def prompts(self) -> list[Any]:
        if not self._input:
            raise SettingError("/generate needs input_ids or text; got neither")
        return self._input if self.is_batch else [self._input]

    @property
    def prompt_from(self) -> int | None:
        """The first token of the prompt whose logprob is wanted."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    @property
    def is_batch(self) -> bool:
        return is_batch(self._input)

    @property
    def _input(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    def requests(self, model: Completer) -> list[SamplingRequest]:
        if not self.return_logprob and (self.top_logprobs_num or self.logprob_start_len not in (None, -1)):
            raise SettingError("logprob_start_len and top_logprobs_num need return_logprob=true")
        scoring = {"top_logprobs": self.top_logprobs_num or 0, "scores_prompt": self.prompt_from is not None}
        return model.requests(self.prompts, self.sampling_params, _SGLANG_NEW_TOKENS, **scoring)

    def response(
        self, requests: Sequence[SamplingRequest], rows: Sequence[Sequence[Completion]], model: Completer
    ) -> Any:
        """One object for one completion, a list for several."""
        results = [self._result(request, c, model) for request, row in zip(requests, rows, strict=True) for c in row]
        return results if self.is_batch or len(results) > 1 else results[0]

    def _result(self, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        ids = completion.token_ids
        finish = (
            {"type": "stop", "matched": completion.matched}
            if completion.finish == "stop"
            else {"type": "length", "length": len(ids)}
        )
        about: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(ids),
            "weight_version": str(completion.versions[-1] if completion.versions else model.policy.version),
            "weight_versions": completion.versions,
        }
        if self.return_logprob:
            about |= self._logprobs(request, completion, model)
        return {"text": completion.text, "output_ids": list(ids), "meta_info": about}

    def _logprobs(self, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        """[logprob, id, text] of each token; the prompt's first has none."""

        def row(logprob: float | None, token: int) -> list[Any]:
            return [logprob, token, model.tokenizer.decode([token]) if self.return_text_in_logprobs else None]

        def rows(logprobs: Sequence[float | None], tokens: Sequence[int]) -> list[list[Any]]:
            return [row(logprob, token) for logprob, token in zip(logprobs, tokens, strict=True)]

        def best(top: Sequence[Sequence[tuple[int, float]]]) -> list[Any]:
            return [[row(value, token) for token, value in pairs] for pairs in top]

        scores: dict[str, Any] = {"output_token_logprobs": rows(completion.logprobs, completion.token_ids)}
        if self.top_logprobs_num:
            scores["output_top_logprobs"] = best(completion.top)
        if completion.prompt is not None:
            start = self.prompt_from
            scores["input_token_logprobs"] = rows([None, *completion.prompt.logprobs], request.prompt_ids)[start:]
            if self.top_logprobs_num:
                scores["input_top_logprobs"] = [None, *best(completion.prompt.top)][start:]
        return scores


class VllmPrompt(RequestForm):
    prompt_token_ids: TokenIds


class VllmBody(SamplingFields):
    """vLLM's `/generate`: `prompt` as text or token ids, and sampling fields at the top level."""

    prompt: str | VllmPrompt
    logprobs: int | None = Field(None, ge=0, le=0, description="0: of the sampled tokens alone")
    stream: bool = False

    def requests(self, model: Completer) -> list[SamplingRequest]:
        prompt = self.prompt if isinstance(self.prompt, str) else self.prompt.prompt_token_ids
        return model.requests([prompt], self, _DEFAULT_COMPLETION_TOKENS)

    def response(
        self, requests: Sequence[SamplingRequest], rows: Sequence[Sequence[Completion]], model: Completer
    ) -> Any:
        (request,), (row,) = requests, rows
        prompt = self.prompt if isinstance(self.prompt, str) else model.tokenizer.decode(list(request.prompt_ids))
        finishes = [c.finish for c in row]
        result: dict[str, Any] = {"text": [c.text for c in row], "prompt": prompt, "finish_reasons": finishes}
        if self.logprobs is not None:
            result["logprobs"] = [[[{str(i): p}] for i, p in zip(c.token_ids, c.logprobs, strict=True)] for c in row]
            result["prompt_token_ids"] = list(request.prompt_ids)
            result["token_ids"] = [list(c.token_ids) for c in row]
        return result


def generate_body(raw: dict[str, Any]) -> SglangBody | VllmBody:
    """A request to `/generate`, recognised as SGLang's or vLLM's by its fields."""
    if any(name in raw for name in ("input_ids", "text", "sampling_params")):
        params = raw.get("sampling_params")
        return SglangBody.read(
            raw | ({"sampling_params": SamplingFields.read(params)} if isinstance(params, dict) else {})
        )
    if "prompt" in raw:
        return VllmBody.read(raw)
    raise SettingError("/generate needs input_ids or text (SGLang's form) or prompt (vLLM's); got neither")


def tool_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as training prompts show it, without other keys of clients (`strict`)."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        return tool
    fields = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": fields}


def response(kind: str, model: Completer) -> Callable[..., dict[str, Any]]:
    """A function that adds `choices` to the fields that all chunks of one response have in common.

    `kind` is chat.completion, chat.completion.chunk or text_completion.
    """
    response_id = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{secrets.token_hex(16)}"
    about = {"id": response_id, "object": kind, "created": int(time.time()), "model": model.name}
    return lambda choices, **more: {**about, "choices": list(choices), **more}


def usage(prompt: int, completions: Sequence[Completion]) -> dict[str, Any]:
    """The `usage` of a response; `prompt` is the number of the prompts' tokens."""
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
