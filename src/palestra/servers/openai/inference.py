"""The inference server: OpenAI's, SGLang's and vLLM's HTTP over any Policy, with the dialects of the gateway.

All requests share the policy's batches, and a client that disconnects cancels its sampling. A large body is parsed
and tokenised in a thread, with a tokenizer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.core.errors import InputError, NotAllowedError, SettingError, UnsupportedError
from palestra.core.types import Problem, SamplingParams
from palestra.core.weights import Weights
from palestra.models.loading import LoadedModel, load_model
from palestra.policy.base import Policy
from palestra.policy.build import build_policy
from palestra.policy.local import token_logprobs
from palestra.servers.gateway.app import MAX_BODY, OBJECT, dialect_routes, error_form, event_stream
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.chat_completions import response, token_text, usage
from palestra.servers.gateway.request import Event, RequestForm, SamplingFields
from palestra.servers.openai.completer import MAX_TOP_LOGPROBS, Completer, Completion, SamplingRequest, decode
from palestra.servers.web import MIB, make_app, parse, read_body, while_connected

_DEFAULT_COMPLETION_TOKENS, _SGLANG_NEW_TOKENS = 16, 128
MAX_PROMPTS = 1024  # x n of one request
T = TypeVar("T")
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompts = Annotated[list[T], Field(max_length=MAX_PROMPTS, fail_fast=True)]
Rows = Sequence[Sequence[Completion]]  # the completions of each request


def sampling_requests(
    model: Completer, prompts: Any, fields: SamplingFields, new_tokens: int, **scoring: Any
) -> list[SamplingRequest]:
    """A sampling request for each prompt of text or token ids; limits are checked before anything is tokenised.

    `new_tokens` is the form's default; `scoring` are top_logprobs and scores_prompt.
    """
    prompts = prompts if is_batch(prompts) else [prompts]
    if len(prompts) * fields.choices > MAX_PROMPTS:
        raise NotAllowedError(
            f"{len(prompts)} prompts x n={fields.choices} in one request; up to {MAX_PROMPTS} completions "
            "are made, send the rest apart"
        )
    ids = [model.encode(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
    model.check_total(sum(map(len, ids)) * fields.choices)
    requests = []
    for prompt_ids in ids:
        if not prompt_ids:
            raise InputError("the prompt is empty; give at least one token to continue from")
        if model.vocabulary is not None and not (min(prompt_ids) >= 0 and max(prompt_ids) < model.vocabulary):
            raise InputError(f"a token id of the prompt is outside the vocabulary 0..{model.vocabulary - 1}")
        params = fields.params(model.eos, model.room_after(len(prompt_ids), "prompt"), new_tokens)
        requests.append(SamplingRequest(prompt_ids, fields.choices, params, **scoring))
    for each in requests:
        model.check_scoring(each)
    return requests


def is_batch(prompt: Any) -> bool:
    """Whether it is a list of prompts, rather than a text or token ids."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


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
        if self.stream and (self.echo or is_batch(self.prompt)):
            raise SettingError("streaming takes one prompt at a time, without echo; send the prompts apart")
        scoring = {"top_logprobs": self.logprobs or 0, "scores_prompt": bool(self.echo) and self.logprobs is not None}
        requests = sampling_requests(model, self.prompt, self, _DEFAULT_COMPLETION_TOKENS, **scoring)
        if self.max_tokens != 0:
            return requests
        return [replace(request, params=replace(request.params, max_new_tokens=0)) for request in requests]

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
    def prompt_from(self) -> int | None:
        """The first token of the prompt whose logprob is wanted."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    @property
    def prompts(self) -> Any:
        return self.text if self.input_ids is None else self.input_ids

    def requests(self, model: Completer) -> list[SamplingRequest]:
        if not self.return_logprob and (self.top_logprobs_num or self.logprob_start_len not in (None, -1)):
            raise SettingError("logprob_start_len and top_logprobs_num need return_logprob=true")
        if not self.prompts:
            raise SettingError("/generate needs input_ids or text; got neither")
        scoring = {"top_logprobs": self.top_logprobs_num or 0, "scores_prompt": self.prompt_from is not None}
        return sampling_requests(model, self.prompts, self.sampling_params, _SGLANG_NEW_TOKENS, **scoring)

    def response(self, requests: Sequence[SamplingRequest], rows: Rows, model: Completer) -> Any:
        """One object for one completion, a list for several."""
        results = [self._result(request, c, model) for request, row in zip(requests, rows, strict=True) for c in row]
        return results if is_batch(self.prompts) or len(results) > 1 else results[0]

    def _result(self, request: SamplingRequest, completion: Completion, model: Completer) -> dict[str, Any]:
        ids = completion.token_ids
        finish: dict[str, Any] = {"type": "length", "length": len(ids)}
        if completion.finish == "stop":
            finish = {"type": "stop", "matched": completion.matched}
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
        return sampling_requests(model, prompt, self, _DEFAULT_COMPLETION_TOKENS)

    def response(self, requests: Sequence[SamplingRequest], rows: Rows, model: Completer) -> Any:
        (request,), (row,) = requests, rows
        prompt = self.prompt if isinstance(self.prompt, str) else model.tokenizer.decode(list(request.prompt_ids))
        result: dict[str, Any] = {"text": [c.text for c in row], "prompt": prompt}
        result["finish_reasons"] = [c.finish for c in row]
        if self.logprobs is not None:
            result["logprobs"] = [[[{str(i): p}] for i, p in zip(c.token_ids, c.logprobs, strict=True)] for c in row]
            result["prompt_token_ids"] = list(request.prompt_ids)
            result["token_ids"] = [list(c.token_ids) for c in row]
        return result


def generate_body(raw: dict[str, Any]) -> SglangBody | VllmBody:
    """A request to `/generate`, recognised as SGLang's or vLLM's by its fields."""
    if any(name in raw for name in ("input_ids", "text", "sampling_params")):
        if isinstance(params := raw.get("sampling_params"), dict):
            raw = raw | {"sampling_params": SamplingFields.read(params)}
        return SglangBody.read(raw)
    if "prompt" in raw:
        return VllmBody.read(raw)
    raise SettingError("/generate needs input_ids or text (SGLang's form) or prompt (vLLM's); got neither")


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


Body = TypeVar("Body", CompletionBody, SglangBody | VllmBody)


class _WeightsFile(BaseModel):
    model_path: Path


def inference_app(model: Completer, *, token: str | None = None, weights_folder: Path | None = None) -> Starlette:
    """The application over one model, whose weights may be updated while it serves.

    With `weights_folder`, a trainer in another process may tell it to load weights from files there.
    """
    api = _Api(model, weights_folder)
    sampling = SamplingParams(model.context_tokens)
    chats = Attempt(Problem("", ""), model, "", sampling=sampling, seed=0, client_sampling=True, records=False)
    routes = [
        Route("/health", api.health, methods=["GET"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/generate", api.generate, methods=["POST"]),
        Route("/update_weights_from_disk", api.update_weights, methods=["POST"]),
        *dialect_routes(lambda attempt_id, key: chats),
    ]
    return make_app(routes, token=token, error_form=error_form)


@dataclass(frozen=True, slots=True)
class _Api:
    _model: Completer
    _weights_folder: Path | None

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._model.name, "policy_version": self._model.policy.version})

    async def completions(self, request: Request) -> Response:
        body, to_sample = await self._read(request, CompletionBody.read)
        if body.stream:
            return event_stream(request, _text_events(request, body, to_sample[0], self._model))
        rows = await self._sample(request, to_sample)
        flat = [(asked, completion) for asked, row in zip(to_sample, rows, strict=True) for completion in row]
        choices = [body.choice(i, asked, completion, self._model) for i, (asked, completion) in enumerate(flat)]
        used = usage(sum(len(each.prompt_ids) for each in to_sample), [completion for _, completion in flat])
        return JSONResponse(response("text_completion", self._model)(choices, usage=used))

    async def generate(self, request: Request) -> Response:
        body, to_sample = await self._read(request, generate_body)
        if body.stream:
            raise UnsupportedError("/generate does not stream here; use /v1/completions or /v1/chat/completions")
        rows = await self._sample(request, to_sample)
        return JSONResponse(body.response(to_sample, rows, self._model))

    async def _read(
        self, request: Request, read: Callable[[dict[str, Any]], Body]
    ) -> tuple[Body, list[SamplingRequest]]:
        """Parse the request and its sampling requests; 400 if it is invalid."""
        raw = await read_body(request, MAX_BODY)

        def prepare(model: Completer) -> tuple[Body, list[SamplingRequest]]:
            body = parse(read, parse(OBJECT.validate_json, raw, 400), 400)
            return body, body.requests(model)

        return await self._model.prepare(len(raw), prepare)

    async def update_weights(self, request: Request) -> Response:
        """Load new weights into the policy (SGLang's endpoint); turns in progress continue with them."""
        if self._weights_folder is None:
            raise UnsupportedError("this server takes no weights; start it with palestra serve … --weights-from FOLDER")
        body = parse(_WeightsFile.model_validate_json, await read_body(request, MIB), 400)
        path = body.model_path.resolve()
        if not path.is_relative_to(self._weights_folder.resolve()) or not path.is_file():
            raise NotAllowedError(f"{path} is no file in {self._weights_folder}, from which this server takes weights")
        self._model.policy.update(Weights.load(path))
        version = self._model.policy.version
        return JSONResponse({"success": True, "message": f"weights of version {version}", "weight_version": version})

    async def _sample(self, request: Request, to_sample: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return await while_connected(request, asyncio.gather(*map(self._model.complete, to_sample)))


async def _text_events(
    request: Request, body: CompletionBody, prompt: SamplingRequest, model: Completer
) -> AsyncIterator[Event]:
    chunk, ended = response("text_completion", model), list[Completion]()
    sent = [""] * prompt.n
    async with contextlib.aclosing(model.stream(prompt)) as source:
        async for i, piece in source:
            if piece is None:
                if await request.is_disconnected():
                    return
            elif isinstance(piece, str):
                sent[i] += piece
                yield Event(chunk([{"index": i, "text": piece, "finish_reason": None, "logprobs": None}]))
            else:
                ended.append(piece)
                choice = body.choice(i, prompt, piece, model)
                yield Event(chunk([{**choice, "text": choice["text"][len(sent[i]) :]}]))
    if (body.stream_options or {}).get("include_usage"):
        yield Event(chunk([], usage=usage(len(prompt.prompt_ids), ended)))
    yield Event("[DONE]")


def load_completer(name: str, *, dtype: str = "auto", device: str = "auto", engine: str = "auto") -> Completer:
    """Load a model by any accepted name, ready to be served."""
    loaded = load_model(name, dtype=dtype, device=device)
    completer = completer_of(loaded, build_policy(loaded.model, loaded.tokenizer, engine, keep_closed=True))
    completer.check_tool_calls()
    return completer


def completer_of(loaded: LoadedModel, policy: Policy[Any], context_tokens: int | None = None) -> Completer:
    """The completer of a loaded model.

    Pass `context_tokens` for a model on another machine, which only returns the logprobs of its samples.
    """
    if context_tokens is not None:
        return Completer(policy, loaded.tokenizer, loaded.name, context_tokens, None, len(loaded.tokenizer))
    score = partial(token_logprobs, loaded.model)
    return Completer(policy, loaded.tokenizer, loaded.name, loaded.context_tokens, score, loaded.vocabulary)
