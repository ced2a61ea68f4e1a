"""The inference server: OpenAI's, SGLang's and vLLM's HTTP over any Policy.

    POST /v1/chat/completions, /v1/completions      GET /v1/models
    POST /generate, /update_weights_from_disk       GET /health

All requests share the policy's batches, and a client that disconnects cancels its sampling.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from palestra.core.errors import PalestraError
from palestra.core.weights import Weights
from palestra.serve import openai_forms as forms
from palestra.serve.completer import Completer, Completion, SamplingRequest
from palestra.serve.generate_forms import generate_body
from palestra.serve.sampling_fields import check_built
from palestra.serve.web import MIB, error_body, make_app, parse, read_body, while_connected

_MAX_BODY = 64 * MIB
_OBJECT = TypeAdapter(dict[str, Any])

Body = TypeVar("Body", bound=BaseModel)


class _WeightsFile(BaseModel):
    model_path: Path


def inference_app(model: Completer, *, token: str | None = None, weights_folder: Path | None = None) -> Starlette:
    """The application over one model; it may be given new weights while it serves.

    With `weights_folder`, a trainer in another process may tell it to load weights from files there.
    """
    api = _Api(model, weights_folder)
    routes = [
        Route("/health", api.health, methods=["GET"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/generate", api.generate, methods=["POST"]),
        Route("/update_weights_from_disk", api.update_weights, methods=["POST"]),
    ]
    return make_app(routes, token=token)


class _Api:
    """One method for each endpoint."""

    def __init__(self, model: Completer, weights_folder: Path | None = None) -> None:
        self._model = model
        self._weights_folder = weights_folder

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._model.name, "policy_version": self._model.policy.version})

    async def models(self, request: Request) -> Response:
        card = {"id": self._model.name, "object": "model", "created": 0, "owned_by": "palestra"}
        return JSONResponse({"object": "list", "data": [{**card, "max_model_len": self._model.context_tokens}]})

    async def completions(self, request: Request) -> Response:
        body = await _read(request, forms.CompletionBody)
        to_sample = body.requests(self._model)
        if body.stream:
            return _events(_stream_text(request, body, to_sample, self._model))
        rows = await while_connected(request, self._all(to_sample))
        flat = [completion for row in rows for completion in row]
        choices = [forms.text_choice(i, c, self._model, body.logprobs is not None) for i, c in enumerate(flat)]
        return JSONResponse(forms.response("text_completion", self._model)(choices, usage=forms.usage(to_sample, flat)))

    async def chat(self, request: Request) -> Response:
        body = await _read(request, forms.ChatBody)
        to_sample = body.request(self._model)
        if body.stream:
            return _events(_stream_chat(request, body, to_sample, self._model))
        row = await while_connected(request, self._model.complete(to_sample))
        with_tools = bool(body.tools_used)
        choices = [forms.chat_choice(i, c, self._model, with_tools, bool(body.logprobs)) for i, c in enumerate(row)]
        return JSONResponse(
            forms.response("chat.completion", self._model)(choices, usage=forms.usage([to_sample], row))
        )

    async def generate(self, request: Request) -> Response:
        raw = parse(_OBJECT.validate_json, await read_body(request, _MAX_BODY))
        body = parse(generate_body, raw)
        if body.stream:
            raise PalestraError("/generate does not stream here; use /v1/completions or /v1/chat/completions")
        to_sample = body.requests(self._model)
        rows = await while_connected(request, self._all(to_sample))
        return JSONResponse(body.response(to_sample, rows, self._model))

    async def update_weights(self, request: Request) -> Response:
        """New weights for the policy, by SGLang's name for it; turns under way go on with them."""
        if self._weights_folder is None:
            raise PalestraError("this server takes no weights; start it with palestra serve … --weights-from FOLDER")
        path = parse(_WeightsFile.model_validate_json, await read_body(request, _MAX_BODY)).model_path.resolve()
        if not path.is_relative_to(self._weights_folder.resolve()) or not path.is_file():
            raise PalestraError(f"{path} is no file in {self._weights_folder}, from which this server takes weights")
        self._model.policy.update(Weights.load(path))
        version = self._model.policy.version
        return JSONResponse({"success": True, "message": f"weights of version {version}", "weight_version": version})

    async def _all(self, to_sample: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(self._model.complete(each) for each in to_sample)))


async def _read(request: Request, kind: type[Body]) -> Body:
    raw = parse(_OBJECT.validate_json, await read_body(request, _MAX_BODY))
    check_built(raw)
    return parse(kind.model_validate, raw)


def _events(pieces: AsyncGenerator[dict[str, Any], None]) -> Response:
    async def lines() -> AsyncIterator[str]:
        async with contextlib.aclosing(pieces) as source:
            try:
                async for piece in source:
                    yield f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
            except PalestraError as error:
                yield f"data: {json.dumps(error_body(400, str(error)))}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _stream_text(
    request: Request, body: forms.CompletionBody, to_sample: Sequence[SamplingRequest], model: Completer
) -> AsyncGenerator[dict[str, Any], None]:
    if len(to_sample) > 1:
        raise PalestraError("streaming takes one prompt at a time; send the prompts apart")
    (prompt,) = to_sample
    chunk, ended = forms.response("text_completion", model), list[Completion]()
    sent = [""] * prompt.n
    async with contextlib.aclosing(model.stream(prompt)) as source:
        async for i, piece in source:
            if piece is None:
                if await request.is_disconnected():
                    return
            elif isinstance(piece, str):
                sent[i] += piece
                yield chunk([{"index": i, "text": piece, "finish_reason": None, "logprobs": None}])
            else:
                ended.append(piece)
                choice = forms.text_choice(i, piece, model, body.logprobs is not None)
                yield chunk([{**choice, "text": choice["text"][len(sent[i]) :]}])
    if (body.stream_options or {}).get("include_usage"):
        yield chunk([], usage=forms.usage(to_sample, ended))


async def _stream_chat(
    request: Request, body: forms.ChatBody, to_sample: SamplingRequest, model: Completer
) -> AsyncGenerator[dict[str, Any], None]:
    chunk, ended = forms.response("chat.completion.chunk", model), list[Completion]()
    with_tools, sent = bool(body.tools_used), [""] * to_sample.n
    for i in range(to_sample.n):
        yield chunk([{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    async with contextlib.aclosing(model.stream(to_sample)) as source:
        async for i, piece in source:
            if piece is None:
                if await request.is_disconnected():
                    return
            elif isinstance(piece, str):
                # beside tool calls the text is trimmed, so no blank beginning may go out
                new = piece.lstrip() if with_tools and not sent[i] else piece
                if new:
                    sent[i] += new
                    yield chunk([{"index": i, "delta": {"content": new}, "finish_reason": None}])
            else:
                ended.append(piece)
                last = forms.last_chat_deltas(i, piece, sent[i], model, with_tools, bool(body.logprobs))
                for delta in last:
                    yield chunk([delta])
    if (body.stream_options or {}).get("include_usage"):
        yield chunk([], usage=forms.usage([to_sample], ended))
