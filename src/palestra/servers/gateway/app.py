"""The gateway's HTTP: which attempt a request belongs to, and which dialect of OpenAI or Anthropic it speaks.

Each path is below /attempt/ID, and also at the root for clients that can set only a key: each attempt has its own.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from palestra.core.errors import ContextLengthError, InputError, PalestraError
from palestra.models.chat.template import ChatFormat
from palestra.servers.forwarding import KEY_PREFIX, ForwardedAgent
from palestra.servers.gateway.anthropic_messages import STATUS, CountBody, MessagesBody
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.chat_completions import ChatCompletionBody
from palestra.servers.gateway.request import (
    NO_EFFECT,
    ChatRequest,
    Event,
    Piece,
    RequestForm,
    changes_answer,
    fit_template,
)
from palestra.servers.gateway.responses import ResponseBody
from palestra.servers.web import MIB, error_body, make_app, message_of, parse, read_body, refuse, while_connected

MAX_BODY = 16 * MIB
_JSON_BYTES = 6  # of one character at most: \u0041
OBJECT = TypeAdapter(dict[str, Any])
_MAX_ENDED = 20_000
# An inference server rejects these. Agents send them as hints, and a training does not sample by its clients' values.
_HINTS = frozenset("prediction web_search_options frequency_penalty presence_penalty length_penalty".split())
_MISSPELT = 0.85  # similarity from which an unknown field counts as a misspelt known one
_MAX_LOGGED = 200  # names, of at most 60 characters each: clients choose them

log = logging.getLogger("palestra")

FindAttempt = Callable[[str | None, str | None], Attempt | ForwardedAgent]  # by the id in the URL, and by the key
Body = ChatCompletionBody | ResponseBody | MessagesBody  # of one dialect
Endpoint = Callable[[Attempt, Request], Awaitable[Response]]
AnyAttempt = TypeVar("AnyAttempt", bound=Attempt | ForwardedAgent)
AnyBody = TypeVar("AnyBody", bound=CountBody | Body)


@dataclass(slots=True)
class OpenAttempts(Generic[AnyAttempt]):
    """Open attempts, and the ids and keys of the last ones that ended."""

    _by_id: dict[str, AnyAttempt] = field(default_factory=dict)
    _by_key: dict[str, AnyAttempt] = field(default_factory=dict)
    _ended: dict[str, None] = field(default_factory=dict)

    def __iter__(self) -> Iterator[AnyAttempt]:
        return iter(list(self._by_id.values()))

    def __contains__(self, attempt_id: str) -> bool:
        """Whether an attempt has this id, open or ended."""
        return attempt_id in self._by_id or attempt_id in self._ended

    def __getitem__(self, attempt_id: str) -> AnyAttempt:
        return self._by_id[attempt_id]

    def add(self, attempt: AnyAttempt) -> None:
        self._by_id[attempt.id] = self._by_key[attempt.api_key] = attempt

    def forget(self, attempt: Attempt | ForwardedAgent) -> None:
        """Forget an attempt, except that it existed."""
        del self._by_id[attempt.id], self._by_key[attempt.api_key]
        self._ended |= {attempt.id: None, attempt.api_key: None}
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def find(self, attempt_id: str | None, key: str | None) -> AnyAttempt:
        """Find an attempt by its URL or its key. A key opens no other attempt, and none that has ended.

        With the URL, which cannot be guessed, any key of no attempt is accepted: some clients send their own. Keys of
        attempts in other processes are known by their prefix.
        """
        if attempt_id in self._ended or key in self._ended:
            raise refuse(401, "this attempt has ended; its key is not valid any more")
        by_key = self._by_key.get(key or "")
        attempt = by_key if attempt_id is None else self._by_id.get(attempt_id)
        if attempt is None:
            what = "the API key" if attempt_id is None else "the attempt in the URL"
            raise refuse(401, f"{what} belongs to no attempt; use the base URL and the key that the attempt was given")
        if (by_key is not None or (key or "").startswith(KEY_PREFIX)) and by_key is not attempt:
            raise refuse(401, "the API key belongs to another attempt than the URL")
        return attempt


@dataclass(slots=True)
class AgentRequests:
    """Prepares the requests of agents that cannot be changed; each name that is left out is logged once per run.

    Coding agents send fields for their own provider (`context_management` of Claude Code, `client_metadata` of Codex)
    and offer hosted tools. Misspelt fields and those that would change the answer (`logit_bias`, `audio`) are refused.
    """

    _logged: set[str] = field(default_factory=set)

    def clean(self, raw: dict[str, Any], form: type[RequestForm], chat: ChatFormat) -> dict[str, Any]:
        """The body without fields and tools that the gateway lacks and the answer does not depend on."""

        def is_extra(name: str) -> bool:
            known = form.model_fields
            if name in known or name in NO_EFFECT or name in _HINTS:
                return name not in known
            misspelt = difflib.get_close_matches(name[:100], known, 1, _MISSPELT)
            return not (changes_answer(name, raw[name]) or misspelt)

        left_out = [name for name in raw if is_extra(name)]
        body = {name: value for name, value in raw.items() if name not in left_out}
        if isinstance(tools := body.get("tools"), list):
            typed = [tool for tool in tools if isinstance(tool, dict) and isinstance(tool.get("type"), str)]
            hosted = [tool for tool in typed if tool["type"] != form.tool_kind]
            body["tools"] = [tool for tool in tools if tool not in hosted]
            left_out += [f"tool {tool['type']}" for tool in hosted]
        if not chat.has_variable("reasoning_effort"):
            reasoning = body.get("reasoning")
            if body.pop("reasoning_effort", None) is not None:
                left_out.append("reasoning_effort")
            if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
                body["reasoning"] = {**reasoning, "effort": None}
                left_out.append("reasoning.effort")
        names = [ascii(name[:60])[1:-1] for name in left_out if name not in NO_EFFECT]
        new = [name for name in names if name not in self._logged]
        if new and len(self._logged) < _MAX_LOGGED:
            self._logged.update(new)
            log.warning("ignored in requests of agents: %s", ", ".join(dict.fromkeys(new)))
        return body


def gateway_app(find: FindAttempt, routes: Sequence[BaseRoute] = (), token: str | None = None) -> Starlette:
    """The application; additional `routes` come first. The token opens attempts; all else needs an attempt's key."""
    dialects, api = dialect_routes(find, AgentRequests()), _Api(find)
    by_url = [Route("/attempt/{attempt}", api.alive, methods=["GET"]), Mount("/attempt/{attempt}", routes=dialects)]

    def has_own_key(path: str) -> bool:
        return path.rstrip("/") != "/attempts"

    return make_app([*routes, *by_url, *dialects], token=token, has_own_key=has_own_key, error_form=error_form)


def dialect_routes(find: FindAttempt, agents: AgentRequests | None = None) -> list[Route]:
    """The endpoints of all dialects, of the gateway and, without `agents`, of `palestra serve`."""
    api = _Api(find, agents)
    posts: dict[str, Endpoint] = {
        "/v1/chat/completions": partial(api.answer, ChatCompletionBody),
        "/v1/responses": partial(api.answer, ResponseBody),
        "/v1/messages": partial(api.answer, MessagesBody),
        "/v1/messages/count_tokens": api.count_tokens,
    }
    gets: dict[str, Endpoint] = {"/v1/models": api.models, "/v1/models/{name:path}": api.models}
    routes = [Route(path, api.with_attempt(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, api.with_attempt(endpoint), methods=["GET"]) for path, endpoint in gets.items()]
    return [*routes, Route("/", api.alive, methods=["GET"])]


@dataclass(slots=True)
class _Api:
    """One method for each endpoint. Without `agents`, every field that is not supported is refused."""

    _find: FindAttempt
    _agents: AgentRequests | None = None

    async def alive(self, request: Request) -> Response:
        """Some agents look at their base URL before the first request (HEAD)."""
        self._find_attempt(request)
        return JSONResponse({"object": "attempt"})

    async def models(self, attempt: Attempt, request: Request) -> Response:
        """The model being trained, alone or under any name: agents ask for the one that they were written for."""
        model, asked = attempt.model, request.path_params.get("name")
        card = {"id": model.name if asked is None else asked, "object": "model", "created": 0}
        card |= {"owned_by": "palestra", "type": "model", "display_name": model.name}
        card |= {"created_at": "1970-01-01T00:00:00Z", "max_model_len": model.context_tokens}
        ends = {"first_id": model.name, "last_id": model.name, "has_more": False}
        return JSONResponse({"object": "list", "data": [card], **ends} if asked is None else card)

    async def count_tokens(self, attempt: Attempt, request: Request) -> Response:
        _, to_count = await self._read(request, attempt, CountBody)
        return JSONResponse({"input_tokens": await attempt.count_tokens(to_count)})

    async def answer(self, form: type[Body], attempt: Attempt, request: Request) -> Response:
        """Sample the next message of a conversation in this form."""
        model = attempt.model
        body, to_sample = await self._read(request, attempt, form)
        if not body.stream:
            answers = await while_connected(request, attempt.answer(to_sample))
            return JSONResponse(body.response(answers, model))
        pieces = attempt.stream(to_sample)
        first = await anext(pieces)  # a refusal comes before the stream begins

        async def until_disconnected() -> AsyncIterator[Piece]:
            async with contextlib.aclosing(pieces):  # then the sampling is cancelled
                yield first
                async for piece in pieces:
                    if piece[1] is None and await request.is_disconnected():
                        return
                    yield piece

        return event_stream(request, body.events(until_disconnected(), model))

    async def _read(self, request: Request, attempt: Attempt, form: type[AnyBody]) -> tuple[AnyBody, ChatRequest]:
        """Parse the body in its dialect; one that is larger than any history that fits the context is refused."""
        model = attempt.model
        limit = MIB + _JSON_BYTES * model.max_characters
        try:
            raw = await read_body(request, min(MAX_BODY, limit))
        except HTTPException as refusal:
            if refusal.status_code != 413 or limit > MAX_BODY:
                raise
            raise ContextLengthError(
                f"the body holds more than {limit} bytes; shorten it", model.context_tokens
            ) from None
        fields = parse(OBJECT.validate_json, raw, 400)
        if self._agents is not None:
            fields = self._agents.clean(fields, form, model.chat)
        read: Any = partial(form.read, stored=attempt.stored) if issubclass(form, ResponseBody) else form.read
        body: AnyBody = parse(read, fields, 400)
        try:  # messages and tools may hold any values
            return body, fit_template(body.request(model), model.chat)
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise InputError(f"the request is not in the form that this endpoint takes: {error}") from error

    def _find_attempt(self, request: Request) -> Attempt | ForwardedAgent:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self._find(request.path_params.get("attempt"), request.headers.get("x-api-key") or bearer or None)

    def with_attempt(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that gets the request's attempt; forwards the request if the agent's model is elsewhere."""

        async def answer(request: Request) -> Response:
            attempt = self._find_attempt(request)
            if isinstance(attempt, ForwardedAgent):
                return await attempt.forward(request)
            try:
                return await endpoint(attempt, request)
            except RecursionError:
                raise InputError("the request is nested too deeply") from None

        return answer


def event_stream(request: Request, events: AsyncIterator[Event]) -> Response:
    """Server-sent events. An error in the middle becomes one, too, in the API's own form."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                data = event.data if isinstance(event.data, str) else json.dumps(event.data, ensure_ascii=False)
                yield f"event: {event.name}\ndata: {data}\n\n" if event.name else f"data: {data}\n\n"
        except Exception as error:
            status = 400 if isinstance(error, PalestraError) else 500
            name = "" if request.scope["path"].endswith("/completions") else "event: error\n"
            yield f"{name}data: {json.dumps(error_form(request, status, error))}\n\n"
            if status == 500:
                raise

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def error_form(request: Request, status: int, error: Exception | str) -> dict[str, Any]:
    if "/v1/messages" not in request.scope["path"]:
        return error_body(status, error)
    kind = STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message_of(error)}}
