"""The inference server: OpenAI's, SGLang's and vLLM's HTTP over any Policy.

    POST /v1/chat/completions, /v1/completions      GET /v1/models, /v1/models/NAME
    POST /generate, /update_weights_from_disk       GET /health

All requests share the policy's batches, and a client that disconnects cancels its sampling. A large body is parsed
and tokenised in a thread, with a tokenizer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from palestra.core.errors import PalestraError
from palestra.core.weights import Weights
from palestra.models.chat.toolcalls import Reply
from palestra.servers.body import MIB, parse, read_body
from palestra.servers.http_errors import error_body, refuse
from palestra.servers.openai import openai_forms as forms
from palestra.servers.openai.completer import Completer, Completion, SamplingRequest
from palestra.servers.openai.generate_forms import generate_body
from palestra.servers.openai.sampling_fields import known_fields
from palestra.servers.web import make_app, while_connected

_MAX_BODY = 16 * MIB
_OBJECT = TypeAdapter(dict[str, Any])


class _Body(Protocol):
    def requests(self, model: Completer) -> list[SamplingRequest]: ...


Body = TypeVar("Body", bound=_Body)
Form = TypeVar("Form", bound=BaseModel)


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
        Route("/v1/models/{name:path}", api.model, methods=["GET"]),
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
        self._card = {"id": model.name, "object": "model", "created": 0, "owned_by": "palestra"} | {
            "max_model_len": model.context_tokens
        }

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "model": self._model.name, "policy_version": self._model.policy.version})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._model.name:
            raise refuse(404, f"the model that is served here is {self._model.name!r}")
        return JSONResponse(self._card)

    async def completions(self, request: Request) -> Response:
        body, to_sample = await self._read(request, partial(_form, forms.CompletionBody))
        if body.stream:
            return _events(_stream_text(request, body, to_sample[0], self._model))
        rows = await while_connected(request, self._all(to_sample))
        flat = [(asked, completion) for asked, row in zip(to_sample, rows, strict=True) for completion in row]
        choices = [body.choice(i, asked, completion, self._model) for i, (asked, completion) in enumerate(flat)]
        usage = forms.usage(to_sample, [completion for _, completion in flat])
        return JSONResponse(forms.response("text_completion", self._model)(choices, usage=usage))

    async def chat(self, request: Request) -> Response:
        body, (to_sample,) = await self._read(request, partial(_form, forms.ChatBody))
        if body.stream:
            pieces = _chat_pieces(request, body, to_sample, self._model)
            return _events(_closing(body.chunks(pieces, self._model), pieces))
        row = await while_connected(request, self._model.complete(to_sample))
        answers = [body.answer(to_sample, completion, self._model) for completion in row]
        more = {"prompt_token_ids": list(to_sample.prompt_ids)} if body.return_token_ids else {}
        return JSONResponse(body.response(answers, self._model) | more)

    async def generate(self, request: Request) -> Response:
        body, to_sample = await self._read(request, generate_body)
        if body.stream:
            raise PalestraError("/generate does not stream here; use /v1/completions or /v1/chat/completions")
        rows = await while_connected(request, self._all(to_sample))
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
            raise PalestraError("this server takes no weights; start it with palestra serve … --weights-from FOLDER")
        body = parse(_WeightsFile.model_validate_json, await read_body(request, MIB), 400)
        path = body.model_path.resolve()
        if not path.is_relative_to(self._weights_folder.resolve()) or not path.is_file():
            raise PalestraError(f"{path} is no file in {self._weights_folder}, from which this server takes weights")
        self._model.policy.update(Weights.load(path))
        version = self._model.policy.version
        return JSONResponse({"success": True, "message": f"weights of version {version}", "weight_version": version})

    async def _all(self, to_sample: Sequence[SamplingRequest]) -> list[list[Completion]]:
        return list(await asyncio.gather(*(self._model.complete(each) for each in to_sample)))


def _form(form: type[Form], raw: dict[str, Any]) -> Form:
    return form.model_validate(known_fields(form, raw))


def _events(pieces: AsyncGenerator[dict[str, Any], None]) -> Response:
    async def lines() -> AsyncIterator[str]:
        async with contextlib.aclosing(pieces) as source:
            try:
                async for piece in source:
                    yield f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"
            except PalestraError as error:
                yield f"data: {json.dumps(error_body(400, error))}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _stream_text(
    request: Request, body: forms.CompletionBody, prompt: SamplingRequest, model: Completer
) -> AsyncGenerator[dict[str, Any], None]:
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
                choice = body.choice(i, prompt, piece, model)
                yield chunk([{**choice, "text": choice["text"][len(sent[i]) :]}])
    if (body.stream_options or {}).get("include_usage"):
        yield chunk([], usage=forms.usage([prompt], ended))


async def _closing(
    chunks: AsyncGenerator[dict[str, Any], None], pieces: AsyncGenerator[Any, None]
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks; the sampling ends with them."""
    async with contextlib.aclosing(pieces), contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield chunk


async def _chat_pieces(
    request: Request, body: forms.ChatBody, to_sample: SamplingRequest, model: Completer
) -> AsyncGenerator[forms.Piece, None]:
    """The pieces of a streamed chat, until the client disconnects."""
    prompt_end, with_tools = model.prompt_end(to_sample.prompt_ids), bool(body.tools_used)
    replies = [model.chat.stream(with_tools=with_tools, prompt_end=prompt_end) for _ in range(to_sample.n)]
    yield -1, forms.PromptSize(len(to_sample.prompt_ids), 0)
    async with contextlib.aclosing(model.stream(to_sample)) as source:
        async for i, piece in source:
            if piece is None:
                if await request.is_disconnected():
                    return
            elif isinstance(piece, str):
                for delta in replies[i].push(piece):
                    yield i, delta
            else:
                answer = body.answer(to_sample, piece, model)
                for delta in replies[i].rest(Reply(answer.thinking, answer.message.text.lstrip()), piece.text):
                    yield i, delta
                yield i, answer
