"""The HTTP server that the Tinker SDK talks to."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.core.errors import PalestraError
from palestra.extras.tinker.server import requests as bodies
from palestra.extras.tinker.server.base_model import BaseModel
from palestra.extras.tinker.server.checkpoints import CheckpointApi
from palestra.extras.tinker.server.futures import Gone, NotFound, Request, TooBusy
from palestra.extras.tinker.server.messages import parse_request, read_forward_backward
from palestra.extras.tinker.server.sampler import SampleRequest
from palestra.extras.tinker.server.service import Service
from palestra.servers.web import MIB, make_app, parse, read_body, refuse

log = logging.getLogger("palestra")

PROTOBUF = "application/x-protobuf"
MAX_BODY_MIB = 64
_ID = re.compile(r"s-[0-9a-f]{6,}[^/]*|tinker:[^/]*")
LONG_POLL_S = 30.0  # the SDK waits 45 s
SWEEP_S = 30.0
_STATUS = ((TooBusy, 429), (Gone, 410), (NotFound, 404))

Json = dict[str, Any]


def tinker_app(service: Service, *, token: str | None = None, long_poll_s: float = LONG_POLL_S) -> Starlette:
    """The server over a service; `token` is the API key that clients send."""
    api, saved = _Api(service, long_poll_s), CheckpointApi(service.checkpoints)
    post, get = partial(_route, "POST"), partial(_route, "GET")
    numbered = partial(_route, "POST", refused=api.count_refused)
    run, checkpoint = "/training_runs/{run_id}", "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    routes = [  # looked through in this order: what is asked for with every sample comes first
        post("/retrieve_future", api.retrieve_future, bodies.RetrieveFuture),
        post("/asample", api.sample, bodies.Sample, limit_mib=MAX_BODY_MIB),
        get("/healthz", lambda request: {"status": "ok"}),
        get("/get_server_capabilities", api.capabilities),
        post("/client/config", api.client_config),
        post("/telemetry", api.telemetry),
        post("/create_session", api.create_session, bodies.CreateSession),
        post("/session_heartbeat", api.heartbeat, bodies.SessionRequest),
        post("/sessions/{session_id}/finish", api.finish),
        get("/sessions/{session_id}", api.get_session),
        get("/sessions", api.list_sessions),
        post("/create_model", _promised(service.create_model), bodies.CreateModel),
        post("/unload_model", api.unload_model, bodies.ModelRequest),
        post("/get_info", api.get_info, bodies.ModelRequest),
        numbered("/forward_backward", api.forward_backward),
        numbered("/optim_step", _promised(service.optim_step), bodies.OptimStep),
        numbered("/save_weights", _promised(partial(service.save, "weights")), bodies.SaveWeights),
        numbered("/save_weights_for_sampler", _promised(service.save_for_sampler), bodies.SaveWeightsForSampler),
        # the files of Hugging Face, which every checkpoint here has
        numbered(
            "/save_weights_external", _promised(partial(service.save, "external_weights")), bodies.SaveWeightsExternal
        ),
        numbered("/load_weights", _promised(service.load), bodies.LoadBody),
        post("/weights_info", saved.weights_info, bodies.WeightsInfo),
        post("/create_sampling_session", api.create_sampling_session, bodies.CreateSamplingSession),
        get("/samplers/{sampling_id}", api.get_sampler),
        post("/cancel_future", api.cancel_future),
        get("/training_runs", saved.list_runs),
        get("/checkpoints", saved.list_all_checkpoints),
        get(run, saved.get_run),
        get(f"{run}/checkpoints", saved.list_checkpoints),
        get(f"{checkpoint}/archive", saved.archive),
        get(f"{checkpoint}/external_weights_urls", saved.file_urls),
        get(f"{checkpoint}/files/{{file}}", saved.file),
        _route("PUT", f"{checkpoint}/ttl", saved.set_ttl, bodies.SetTtl),
        _route("DELETE", checkpoint, saved.delete_checkpoint),
        Route("/api/v1/{path:path}", _not_served, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return make_app(routes, token=token, lifespan=api.lifespan)


def _route(
    method: str,
    path: str,
    handler: Callable[..., Any],
    form: Any = None,
    *,
    limit_mib: int = 1,
    refused: Callable[[HttpRequest, str], None] | None = None,
) -> Route:
    """A route whose handler gets the request and, with a `form`, its body; plain functions run in a thread."""
    validate = None if form is None else TypeAdapter(form).validate_json

    async def explained(request: HttpRequest) -> Response:
        try:
            arguments: list[Any] = [request]
            if validate is not None:
                request.state.body = await read_body(request, limit_mib * MIB)
                arguments.append(parse(validate, request.state.body))
            if inspect.iscoroutinefunction(handler):
                answer = await handler(*arguments)
            else:
                answer = await asyncio.to_thread(handler, *arguments)
            return answer if isinstance(answer, Response) else JSONResponse(answer)
        except PalestraError as error:
            if refused is not None and not isinstance(error, TooBusy):
                refused(request, str(error))
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 400)
            raise refuse(status, str(error), retry_after_s=1 if status == 429 else None) from None
        except HTTPException as error:
            if refused is not None:
                refused(request, str(error.detail))
            raise
        except Exception as error:  # not 500: the SDK would send the same again for hours
            log.exception("%s failed", path)
            raise refuse(400, f"the server failed: {type(error).__name__}: {error}") from None

    return Route(f"/api/v1{path}", explained, methods=[method])


def _promised(start: Callable[[Any], Request]) -> Callable[..., Any]:
    """A handler that starts the request of a body."""

    async def promise(request: HttpRequest, body: Any) -> Json:
        return _promise(start(body), model_id=body.model_id)

    return promise


async def _not_served(request: HttpRequest) -> Response:
    raise refuse(
        404, f"this server does not serve {request.method} {_ID.sub('…', request.url.path)}; it has no use here"
    )


class _Api:
    def __init__(self, service: Service, long_poll_s: float) -> None:
        self._service = service
        self._long_poll_s = long_poll_s

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            self._service.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._service.end_idle()
            await asyncio.to_thread(self._service.checkpoints.delete_expired)

    # sessions

    async def capabilities(self, request: HttpRequest) -> Json:
        models = [
            {"model_name": b.name, "max_context_length": b.context, "trainable": True, "sampleable": True}
            for b in self._service.bases.values()
        ]
        return {"supported_models": models}

    async def client_config(self, request: HttpRequest) -> Json:
        return {"proto_compress_fwdbwd": find_spec("zstandard") is not None, "use_pyqwest_transport": False}

    async def telemetry(self, request: HttpRequest) -> Json:
        await read_body(request, MAX_BODY_MIB * MIB)
        return {"status": "accepted"}

    async def create_session(self, request: HttpRequest, body: bodies.CreateSession) -> Json:
        metadata = {**(body.user_metadata or {}), **({"tags": body.tags} if body.tags else {})}
        session_id = self._service.create_session(body.display_name or "tinker", metadata)
        return {"type": "create_session", "session_id": session_id}

    async def heartbeat(self, request: HttpRequest, body: bodies.SessionRequest) -> Json:
        self._service.session(body.session_id)
        return {"type": "session_heartbeat"}

    async def finish(self, request: HttpRequest) -> Json | Response:
        await read_body(request, MIB)
        self._service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def get_session(self, request: HttpRequest) -> Json:
        session = self._service.session(request.path_params["session_id"])
        models = [m.id for m in self._service.models.values() if m.session == session.id]
        samplers = list(session.sampling.values())
        return {"training_run_ids": models, "sampler_ids": samplers, "display_name": session.name}

    async def list_sessions(self, request: HttpRequest) -> Json:
        return {"sessions": list(self._service.sessions)}

    # training

    async def unload_model(self, request: HttpRequest, body: bodies.ModelRequest) -> Json:
        return _promise(self._service.unload(self._service.model(body.model_id).id))

    async def get_info(self, request: HttpRequest, body: bodies.ModelRequest) -> Json:
        model = self._service.model(body.model_id)
        base, rank = model.base, model.spec.rank
        data = {"model_name": _loadable_name(base), "tokenizer_id": base.path, "arch": base.architecture}
        lora = {"is_lora": rank > 0, "lora_rank": rank}
        return {"type": "get_info", "model_id": model.id, "model_data": data, "model_name": base.name, **lora}

    async def forward_backward(self, request: HttpRequest) -> Json:
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise refuse(415, f"forward_backward takes {PROTOBUF}; use tinker 0.25 or newer")
        request.state.body = await read_body(request, MAX_BODY_MIB * MIB)
        body = read_forward_backward(request.state.body)
        return _promise(self._service.forward_backward(body), model_id=body.model_id)

    def count_refused(self, request: HttpRequest, reason: str) -> None:
        """The number of a request that is refused counts: the model's later ones must not wait for it."""
        body = getattr(request.state, "body", b"")
        with contextlib.suppress(PalestraError, ValueError, KeyError, TypeError, RecursionError):
            fields = json.loads(body) if body[:1] == b"{" else None
            if fields is None:
                message = parse_request(body)
                model_id, seq_id = message.model_id, message.seq_id
            else:
                model_id, seq_id = str(fields.get("model_id")), int(fields["seq_id"])
            if model := self._service.models.get(model_id):
                model.worker.refuse(seq_id, reason)

    # sampling

    async def create_sampling_session(self, request: HttpRequest, body: bodies.CreateSamplingSession) -> Json:
        sampling_id = self._service.create_sampling_session(body)
        return {"type": "create_sampling_session", "sampling_session_id": sampling_id}

    async def get_sampler(self, request: HttpRequest) -> Json:
        session = self._service.sampling_session(request.path_params["sampling_id"])
        return {"sampler_id": session.id, "base_model": _loadable_name(session.base), "model_path": session.path}

    async def sample(self, request: HttpRequest, body: bodies.Sample) -> Json:
        if body.sampling_session_id is not None:
            target = self._service.sampling_session(body.sampling_session_id)
        else:
            target = self._service.new_sampling_session(body.base_model, body.model_path)
        prompt, base = body.prompt.tokens, target.base
        if not 0 < len(prompt) < base.context:
            raise refuse(400, f"the prompt has {len(prompt)} tokens; the model takes 1 to {base.context - 1}")
        if wrong := [token for token in (min(prompt), max(prompt)) if not 0 <= token < base.vocabulary]:
            raise refuse(400, f"token id {wrong[0]} is outside the vocabulary 0..{base.vocabulary - 1}")
        targets = body.target_prompt_logprobs
        asked = SampleRequest(
            target.weights,
            prompt,
            body.turns(base.context - len(prompt), base.end_ids),
            prompt_logprobs=bool(body.prompt_logprobs),
            prompt_logprobs_last_n=body.prompt_logprobs_last_n,
            topk_prompt=body.topk_prompt_logprobs,
            topk_sample=body.topk_sample_logprobs,
            targets=None if targets is None else targets.tensor,
        )
        started = self._service.sample(target, body.seq_id, asked)
        return _promise(started, sample_sequence_ids=[f"{started.id}:{i}" for i in range(body.num_samples)])

    # answers

    async def retrieve_future(self, request: HttpRequest, body: bodies.RetrieveFuture) -> Json | Response:
        started = self._service.requests.find(body.request_id)
        with contextlib.suppress(Exception):  # its error is read below
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(started.future)), self._long_poll_s)
        if not started.future.done():
            return {"type": "try_again", "request_id": started.id, "queue_state": "active"}
        self._service.requests.fetched(started)
        if error := started.future.exception():
            ours = isinstance(error, PalestraError)
            message = str(error) if ours else f"{type(error).__name__}: {error}"
            return {"error": message, "category": "user" if ours else "server"}
        result = started.future.result()
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result

    async def cancel_future(self, request: HttpRequest) -> Json:
        await read_body(request, MIB)  # what was begun is finished; nobody asks for it
        return {}


def _loadable_name(base: BaseModel) -> str:
    """A folder instead of a name, since the SDK loads the tokenizer from it; it cuts "/a/b" short, but not "/a/b/"."""
    return base.path + "/" * (base.path.count("/") == 2)


def _promise(request: Request, **more: Any) -> Json:
    return {"request_id": request.id, **more}
