"""The inference server: OpenAI's, SGLang's and vLLM's HTTP over any Policy, with the dialects of the gateway.

All requests share the policy's batches, and a client that disconnects cancels its sampling. A large body is parsed
and tokenised in a thread, with a tokenizer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.core.errors import NotAllowedError, UnsupportedError
from palestra.core.types import Problem, SamplingParams
from palestra.core.weights import Weights
from palestra.servers.body import MIB, parse, read_body
from palestra.servers.gateway.app import dialect_routes, error_form, event_stream
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.request import Event
from palestra.servers.openai import openai_forms as forms
from palestra.servers.openai.completer import Completer, Completion, SamplingRequest
from palestra.servers.web import make_app, while_connected

_MAX_BODY = 16 * MIB
_OBJECT = TypeAdapter(dict[str, Any])


Body = TypeVar("Body", forms.CompletionBody, forms.SglangBody | forms.VllmBody)


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


class _Api:
    """One method for each endpoint."""

    def __init__(self, model: Completer, weights_folder: Path | None) -> None:
        self._model = model
        self._weights_folder = weights_folder

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._model.name, "policy_version": self._model.policy.version})

    async def completions(self, request: Request) -> Response:
        body, to_sample = await self._read(request, forms.CompletionBody.read)
        if body.stream:
            return event_stream(request, _text_events(request, body, to_sample[0], self._model))
        rows = await self._sample(request, to_sample)
        flat = [(asked, completion) for asked, row in zip(to_sample, rows, strict=True) for completion in row]
        choices = [body.choice(i, asked, completion, self._model) for i, (asked, completion) in enumerate(flat)]
        usage = forms.usage(sum(len(each.prompt_ids) for each in to_sample), [completion for _, completion in flat])
        return JSONResponse(forms.response("text_completion", self._model)(choices, usage=usage))

    async def generate(self, request: Request) -> Response:
        body, to_sample = await self._read(request, forms.generate_body)
        if body.stream:
            raise UnsupportedError("/generate does not stream here; use /v1/completions or /v1/chat/completions")
        rows = await self._sample(request, to_sample)
        return JSONResponse(body.response(to_sample, rows, self._model))

    async def _read(
        self, request: Request, read: Callable[[dict[str, Any]], Body]
    ) -> tuple[Body, list[SamplingRequest]]:
        """Parse the request and its sampling requests; 400 if it is invalid."""
        raw = await read_body(request, _MAX_BODY)

        def prepare(model: Completer) -> tuple[Body, list[SamplingRequest]]:
            body = parse(read, parse(_OBJECT.validate_json, raw, 400), 400)
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
    request: Request, body: forms.CompletionBody, prompt: SamplingRequest, model: Completer
) -> AsyncIterator[Event]:
    chunk, ended = forms.response("text_completion", model), list[Completion]()
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
        yield Event(chunk([], usage=forms.usage(len(prompt.prompt_ids), ended)))
    yield Event("[DONE]")
