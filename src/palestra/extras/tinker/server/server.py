"""The HTTP server that the Tinker SDK talks to."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
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
from palestra.extras.tinker.server.checkpoints import TinkerPath, read_page
from palestra.extras.tinker.server.futures import Request, Requests, TooBusy
from palestra.extras.tinker.server.messages import read_forward_backward
from palestra.extras.tinker.server.service import Service
from palestra.servers.web import MIB, make_app, parse, read_body, refuse

log = logging.getLogger("palestra")

PROTOBUF = "application/x-protobuf"
MAX_BODY_MIB = 64
_ID = re.compile(r"s-[0-9a-f]{6,}[^/]*|tinker:[^/]*")
LONG_POLL_S = 30.0  # the SDK waits 45 s
SWEEP_S = 30.0


def tinker_app(service: Service, *, token: str | None = None, long_poll_s: float = LONG_POLL_S) -> Starlette:
    """The server over a service; `token` is the API key that clients send."""
    saved = service.checkpoints
    post, get, read = partial(_route, "POST"), partial(_route, "GET"), partial(_route, "GET", in_thread=True)
    numbered = partial(_route, "POST", refused=service.refuse)
    run, checkpoint = "/training_runs/{run_id}", "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    routes = [  # looked through in this order: what is asked for with every sample comes first
        post("/retrieve_future", partial(_result, service.requests, long_poll_s), bodies.RetrieveFuture),
        post("/asample", service.sample, bodies.Sample, limit_mib=MAX_BODY_MIB),
        get("/healthz", lambda: {"status": "ok"}),
        get("/get_server_capabilities", service.capabilities),
        post("/client/config", _client_config),
        post("/telemetry", lambda: {"status": "accepted"}, limit_mib=MAX_BODY_MIB),
        post("/create_session", service.create_session, bodies.CreateSession),
        post("/session_heartbeat", service.heartbeat, bodies.SessionRequest),
        post("/sessions/{session_id}/finish", service.finish_session),
        get("/sessions/{session_id}", service.get_session),
        get("/sessions", lambda: {"sessions": list(service.sessions)}),
        post("/create_model", service.create_model, bodies.CreateModel),
        post("/unload_model", lambda body: service.unload(service.model(body.model_id).id), bodies.ModelRequest),
        post("/get_info", service.get_info, bodies.ModelRequest),
        numbered("/forward_backward", service.forward_backward, read_forward_backward, limit_mib=MAX_BODY_MIB),
        numbered("/optim_step", service.optim_step, bodies.OptimStep),
        numbered("/save_weights", partial(service.save, "weights"), bodies.SaveWeights),
        numbered("/save_weights_for_sampler", service.save_for_sampler, bodies.SaveWeightsForSampler),
        # the files of Hugging Face, which every checkpoint here has
        numbered("/save_weights_external", partial(service.save, "external_weights"), bodies.SaveWeightsExternal),
        numbered("/load_weights", service.load, bodies.LoadBody),
        post("/weights_info", saved.weights_info, bodies.WeightsInfo, in_thread=True),
        post("/create_sampling_session", service.create_sampling_session, bodies.CreateSamplingSession),
        get("/samplers/{sampling_id}", service.get_sampler),
        post("/cancel_future", dict),  # what was begun is finished; nobody asks for it
        read("/training_runs", saved.list_runs, read_page),
        read("/checkpoints", saved.list_all_checkpoints, read_page),
        read(run, saved.get_run),
        read(f"{run}/checkpoints", saved.list_checkpoints),
        read(f"{checkpoint}/archive", saved.archive),
        read(f"{checkpoint}/external_weights_urls", saved.file_urls, lambda request: str(request.url)),
        read(f"{checkpoint}/files/{{file}}", saved.file),
        _route("PUT", f"{checkpoint}/ttl", saved.set_ttl, bodies.SetTtl, in_thread=True),
        _route("DELETE", checkpoint, saved.delete, in_thread=True),
        Route("/api/v1/{path:path}", _not_served, methods=["GET", "POST", "PUT", "DELETE"]),
    ]

    async def sweep() -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            service.end_idle()
            await asyncio.to_thread(saved.delete_expired)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(sweep())
        try:
            yield
        finally:
            sweeper.cancel()
            service.close()

    return make_app(routes, token=token, lifespan=lifespan)


def _route(
    method: str,
    path: str,
    handler: Callable[..., Any],
    form: Any = None,
    *,
    limit_mib: int = 1,
    refused: Callable[[bytes, str], None] | None = None,
    in_thread: bool = False,
) -> Route:
    """A route whose handler gets the parts of the path by name, a checkpoint's as one, and what `form` reads.

    A form is the type of a JSON body, or a function of the body; without a body, of the request.
    """
    has_body = method in ("POST", "PUT")
    read = form if form is None or inspect.isfunction(form) else partial(parse, TypeAdapter(form).validate_json)

    async def explained(request: HttpRequest) -> Response:
        body = b""
        try:
            if form is read_forward_backward and PROTOBUF not in request.headers.get("content-type", ""):
                raise refuse(415, f"forward_backward takes {PROTOBUF}; use tinker 0.25 or newer")
            if has_body:
                body = await read_body(request, limit_mib * MIB)
            arguments = [] if read is None else [read(body if has_body else request)]
            work = partial(handler, *arguments, **_parts(request))
            answer = await asyncio.to_thread(work) if in_thread else work()
            if inspect.isawaitable(answer):
                answer = await answer
            if isinstance(answer, Response):
                return answer
            if answer is None:
                return Response(status_code=204)
            return JSONResponse(answer.promise if isinstance(answer, Request) else answer)
        except PalestraError as error:
            if refused is not None and not isinstance(error, TooBusy):
                refused(body, str(error))
            status = getattr(error, "status", 400)
            raise refuse(status, str(error), retry_after_s=1 if status == 429 else None) from None
        except HTTPException as error:
            if refused is not None:
                refused(body, str(error.detail))
            raise
        except Exception as error:  # not 500: the SDK would send the same again for hours
            log.exception("%s failed", path)
            raise refuse(400, f"the server failed: {type(error).__name__}: {error}") from None

    return Route(f"/api/v1{path}", explained, methods=[method])


def _parts(request: HttpRequest) -> dict[str, Any]:
    parts = dict(request.path_params)
    if "kind" in parts:
        names = [parts.pop(name) for name in ("run_id", "kind", "name")]
        parts["path"] = TinkerPath.parse(f"tinker://{'/'.join(names)}")
    return parts


async def _not_served(request: HttpRequest) -> Response:
    raise refuse(
        404, f"this server does not serve {request.method} {_ID.sub('…', request.url.path)}; it has no use here"
    )


def _client_config() -> dict[str, bool]:
    return {"proto_compress_fwdbwd": find_spec("zstandard") is not None, "use_pyqwest_transport": False}


async def _result(requests: Requests, long_poll_s: float, body: bodies.RetrieveFuture) -> dict[str, Any] | Response:
    started = requests.find(body.request_id)
    with contextlib.suppress(Exception):  # its error is read below
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(started.future)), long_poll_s)
    if not started.future.done():
        return {"type": "try_again", "request_id": started.id, "queue_state": "active"}
    requests.fetched(started)
    if error := started.future.exception():
        ours = isinstance(error, PalestraError)
        message = str(error) if ours else f"{type(error).__name__}: {error}"
        return {"error": message, "category": "user" if ours else "server"}
    result = started.future.result()
    return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else result
