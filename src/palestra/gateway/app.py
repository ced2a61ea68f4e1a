"""The gateway's HTTP: which attempt a request belongs to, and which dialect it speaks.

    POST /attempt/ID/v1/chat/completions      GET /attempt/ID/v1/models

and the same without /attempt/ID for clients that can set only a key: each attempt has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from palestra.gateway.attempt import Attempt
from palestra.gateway.chat_completions import ChatCompletionBody
from palestra.serve.completer import Completer
from palestra.serve.web import MIB, make_app, parse, read_body, while_connected

_MAX_BODY = 16 * MIB
_OBJECT = TypeAdapter(dict[str, Any])

FindAttempt = Callable[[str | None, str | None], Attempt]  # by the id in the URL, and by the key


def gateway_app(model: Completer, find: FindAttempt, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """The application; `routes` of others come first."""
    api = _Api(model, find)
    dialects = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name:path}", api.model, methods=["GET"]),
    ]
    return make_app([*routes, Mount("/attempt/{attempt}", routes=dialects), *dialects])


class _Api:
    """One method for each endpoint."""

    def __init__(self, model: Completer, find: FindAttempt) -> None:
        self._model = model
        self._find = find
        self._card = {"id": model.name, "object": "model", "created": 0, "owned_by": "palestra"}

    async def models(self, request: Request) -> Response:
        self._attempt(request)
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request) -> Response:
        self._attempt(request)
        return JSONResponse(self._card | {"id": request.path_params["name"]})

    async def chat(self, request: Request) -> Response:
        attempt = self._attempt(request)
        body = await _read(request, ChatCompletionBody.read)
        answers = await while_connected(request, attempt.answer(body.request(self._model)))
        return JSONResponse(body.response(answers, self._model))

    def _attempt(self, request: Request) -> Attempt:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self._find(request.path_params.get("attempt"), request.headers.get("x-api-key") or bearer or None)


async def _read(request: Request, read: Callable[[dict[str, Any]], Any]) -> Any:
    raw = await read_body(request, _MAX_BODY)
    return parse(read, parse(_OBJECT.validate_json, raw, 400), 400)
