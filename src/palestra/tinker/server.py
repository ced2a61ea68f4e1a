"""The HTTP server that the Tinker SDK talks to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from palestra.core.errors import PalestraError
from palestra.serve.web import MIB, make_app, parse, read_body, refuse
from palestra.tinker import requests as bodies
from palestra.tinker.base_model import AdapterSpec
from palestra.tinker.checkpoints import Checkpoint, TinkerPath
from palestra.tinker.futures import Gone, NotHere, Request, Result, TooBusy
from palestra.tinker.messages import read_forward_backward
from palestra.tinker.service import SamplingSession, Service

log = logging.getLogger("palestra")

PROTOBUF = "application/x-protobuf"
MAX_BODY_MIB = 64
_ID = re.compile(r"s-[0-9a-f]{6,}[^/]*|tinker:[^/]*")
LONG_POLL_S = 30.0  # the SDK waits 45 s
SWEEP_S = 30.0
_STATUS = ((TooBusy, 429), (Gone, 410), (NotHere, 404))

Body = TypeVar("Body", bound=BaseModel)
Handler = Callable[[HttpRequest], Awaitable[Response]]


def tinker_app(service: Service, *, token: str | None = None, long_poll_s: float = LONG_POLL_S) -> Starlette:
    """The server over a service; `token` is the API key that clients send."""
    api = _Api(service, long_poll_s)
    post, get = partial(_route, "POST"), partial(_route, "GET")
    numbered = partial(_route, "POST", refused=api.count_refused)
    run, checkpoint = "/training_runs/{run_id}", "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    routes = [
        get("/healthz", api.health),
        get("/get_server_capabilities", api.capabilities),
        post("/client/config", api.client_config),
        post("/telemetry", api.telemetry),
        post("/create_session", api.create_session),
        post("/session_heartbeat", api.heartbeat),
        post("/sessions/{session_id}/finish", api.finish),
        get("/sessions/{session_id}", api.get_session),
        get("/sessions", api.list_sessions),
        post("/create_model", api.create_model),
        post("/unload_model", api.unload_model),
        post("/get_info", api.get_info),
        numbered("/forward_backward", api.forward_backward),
        numbered("/optim_step", api.optim_step),
        numbered("/save_weights", api.save_weights),
        numbered("/save_weights_for_sampler", api.save_weights_for_sampler),
        numbered("/save_weights_external", api.save_weights_external),
        numbered("/load_weights", api.load_weights),
        post("/weights_info", api.weights_info),
        post("/create_sampling_session", api.create_sampling_session),
        get("/samplers/{sampling_id}", api.get_sampler),
        post("/asample", api.sample),
        post("/retrieve_future", api.retrieve_future),
        post("/cancel_future", api.cancel_future),
        get("/training_runs", api.list_runs),
        get("/checkpoints", api.list_all_checkpoints),
        get(run, api.get_run),
        get(f"{run}/checkpoints", api.list_checkpoints),
        get(f"{checkpoint}/archive", api.archive),
        get(f"{checkpoint}/external_weights_urls", api.file_urls),
        get(f"{checkpoint}/files/{{file}}", api.file),
        _route("PUT", f"{checkpoint}/ttl", api.set_ttl),
        _route("DELETE", checkpoint, api.delete_checkpoint),
        Route("/api/v1/{path:path}", _not_served, methods=["GET", "POST", "PUT", "DELETE"]),
    ]
    return make_app(routes, token=token, lifespan=api.lifespan)


def _route(
    method: str, path: str, handler: Handler, refused: Callable[[HttpRequest, str], None] | None = None
) -> Route:
    async def explained(request: HttpRequest) -> Response:
        try:
            return await handler(request)
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


async def _not_served(request: HttpRequest) -> Response:
    raise refuse(
        404, f"this server does not serve {request.method} {_ID.sub('…', request.url.path)}; it has no use here"
    )


class _Api:
    """One method for each endpoint."""

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

    async def health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: HttpRequest) -> Response:
        models = [
            {"model_name": b.name, "max_context_length": b.context, "trainable": True, "sampleable": True}
            for b in self._service.bases.values()
        ]
        return JSONResponse({"supported_models": models})

    async def client_config(self, request: HttpRequest) -> Response:
        return JSONResponse({"proto_compress_fwdbwd": _can_unpack_zstd(), "use_pyqwest_transport": False})

    async def telemetry(self, request: HttpRequest) -> Response:
        await read_body(request, MAX_BODY_MIB * MIB)
        return JSONResponse({"status": "accepted"})

    async def create_session(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.CreateSession)
        metadata = {**(body.user_metadata or {}), **({"tags": body.tags} if body.tags else {})}
        session_id = self._service.create_session(body.display_name or "tinker", metadata)
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def heartbeat(self, request: HttpRequest) -> Response:
        self._service.session((await _read(request, bodies.OfSession)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: HttpRequest) -> Response:
        await read_body(request, MIB)
        self._service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    async def get_session(self, request: HttpRequest) -> Response:
        session = self._service.session(request.path_params["session_id"])
        models = [m.id for m in self._service.models.values() if m.session == session.id]
        return JSONResponse(
            {"training_run_ids": models, "sampler_ids": list(session.sampling.values()), "display_name": session.name}
        )

    async def list_sessions(self, request: HttpRequest) -> Response:
        return JSONResponse({"sessions": list(self._service.sessions)})

    # training

    async def create_model(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.CreateModel)
        lora = body.lora_config
        spec, seed = (AdapterSpec(), 0) if lora is None else (lora.spec, lora.seed or 0)
        found = self._service.create_model(
            body.session_id, body.model_seq_id, body.base_model, spec, seed, body.user_metadata or {}
        )
        return _promise(found, model_id=f"{body.session_id}:train:{body.model_seq_id}")

    async def unload_model(self, request: HttpRequest) -> Response:
        model = self._service.model((await _read(request, bodies.OfModel)).model_id)
        return _promise(self._service.unload(model.id))

    async def get_info(self, request: HttpRequest) -> Response:
        model = self._service.model((await _read(request, bodies.OfModel)).model_id)
        base, rank = model.base, model.spec.rank
        data = {"model_name": base.name, "tokenizer_id": base.path, "arch": base.architecture}
        return JSONResponse(
            {"type": "get_info", "model_id": model.id, "model_data": data, "model_name": base.name,
             "is_lora": rank > 0, "lora_rank": rank}
        )  # fmt: skip

    async def forward_backward(self, request: HttpRequest) -> Response:
        if PROTOBUF not in request.headers.get("content-type", ""):
            raise refuse(415, f"forward_backward takes {PROTOBUF}; use tinker 0.25 or newer")
        request.state.body = await read_body(request, MAX_BODY_MIB * MIB)
        found = read_forward_backward(request.state.body)
        return _promise(self._service.forward_backward(found), model_id=found.model_id)

    async def optim_step(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.OptimStep)
        found = self._service.optim_step(body.model_id, body.seq_id, body.adam.params)
        return _promise(found, model_id=body.model_id)

    async def save_weights(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.SaveWeights)
        found = self._service.save(
            body.model_id, body.seq_id, "weights", body.path, overwrite=body.overwrite,
            ttl_s=body.ttl_seconds, user_metadata=body.user_metadata,
        )  # fmt: skip
        return _promise(found, model_id=body.model_id)

    async def save_weights_for_sampler(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.SaveWeightsForSampler)
        if body.path is None:
            found = self._service.pin(body.model_id, body.seq_id, body.sampling_session_seq_id)
        else:
            found = self._service.save(
                body.model_id, body.seq_id, "sampler_weights", body.path, overwrite=True,
                ttl_s=body.ttl_seconds, user_metadata=body.user_metadata,
            )  # fmt: skip
        return _promise(found, model_id=body.model_id)

    async def save_weights_external(self, request: HttpRequest) -> Response:
        """Weights as the files of Hugging Face, which every checkpoint here has."""
        body = await _read(request, bodies.SaveWeightsExternal)
        found = self._service.save(
            body.model_id, body.seq_id, "external_weights", body.path, overwrite=True, ttl_s=body.ttl_seconds,
            user_metadata=None,
        )  # fmt: skip
        return _promise(found, model_id=body.model_id)

    def count_refused(self, request: HttpRequest, reason: str) -> None:
        """The number of a request that is refused counts: the model's later ones must not wait for it."""
        model_id, seq_id = bodies.number_of(getattr(request.state, "body", b""))
        if seq_id is not None and (model := self._service.models.get(model_id)) is not None:
            with contextlib.suppress(PalestraError):
                model.worker.refuse(seq_id, reason)

    async def load_weights(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.LoadWeights)
        found = self._service.load(body.model_id, body.seq_id, body.path, optimizer=body.optimizer)
        return _promise(found, model_id=body.model_id)

    # sampling

    async def create_sampling_session(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.CreateSamplingSession)
        sampling_id = self._service.create_sampling_session(
            body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path
        )
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampling_id})

    async def get_sampler(self, request: HttpRequest) -> Response:
        found = self._service.sampling_session(request.path_params["sampling_id"])
        return JSONResponse({"sampler_id": found.id, "base_model": found.base.name, "model_path": found.path})

    async def sample(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.Sample, MAX_BODY_MIB)
        target = self._target(body)
        prompt, base = body.prompt.tokens, target.base
        if not 0 < len(prompt) < base.context:
            raise refuse(400, f"the prompt has {len(prompt)} tokens; the model takes 1 to {base.context - 1}")
        if wrong := [token for token in prompt if not 0 <= token < base.vocabulary]:
            raise refuse(400, f"token id {wrong[0]} is outside the vocabulary 0..{base.vocabulary - 1}")
        targets = body.target_prompt_logprobs
        found = self._service.sample(
            target,
            body.seq_id,
            prompt,
            body.turns(base.context - len(prompt), base.end_ids),
            prompt_logprobs=bool(body.prompt_logprobs),
            prompt_logprobs_last_n=body.prompt_logprobs_last_n,
            topk_prompt=body.topk_prompt_logprobs,
            topk_sample=body.topk_sample_logprobs,
            targets=None if targets is None else targets.tensor,
        )
        return _promise(found, sample_sequence_ids=[f"{found.id}:{i}" for i in range(body.num_samples)])

    def _target(self, body: bodies.Sample) -> SamplingSession:
        if body.sampling_session_id is not None:
            return self._service.sampling_session(body.sampling_session_id)
        return self._service.unnamed_sampling_session(body.base_model, body.model_path)

    # answers

    async def retrieve_future(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.RetrieveFuture)
        found = self._service.requests.find(body.request_id)
        result = await _result(found.future, self._long_poll_s)
        if result is None:
            return JSONResponse({"type": "try_again", "request_id": found.id, "queue_state": "active"})
        self._service.requests.fetched(found)
        if isinstance(result, Exception):
            ours = isinstance(result, PalestraError)
            message = str(result) if ours else f"{type(result).__name__}: {result}"
            return JSONResponse({"error": message, "category": "user" if ours else "server"})
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)

    async def cancel_future(self, request: HttpRequest) -> Response:
        await read_body(request, MIB)  # what was begun is finished; nobody asks for it
        return JSONResponse({})

    # checkpoints

    async def weights_info(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.WeightsInfo)
        found = self._service.checkpoints.find(TinkerPath.parse(body.tinker_path))
        spec = found.spec
        return JSONResponse(
            {"base_model": found.base_model, "is_lora": True,  # the SDK resumes from adapters alone; rank 0 is ours
             "lora_rank": spec.rank, "train_unembed": spec.train_unembed, "train_mlp": spec.train_mlp,
             "train_attn": spec.train_attn}
        )  # fmt: skip

    async def list_runs(self, request: HttpRequest) -> Response:
        offset, limit = _page(request)
        ids = self._service.checkpoints.run_ids()
        runs = [self._run(run_id) for run_id in ids[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(ids)}
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def get_run(self, request: HttpRequest) -> Response:
        return JSONResponse(self._run(request.path_params["run_id"]))

    async def list_checkpoints(self, request: HttpRequest) -> Response:
        found = self._service.checkpoints.of_run(request.path_params["run_id"])
        return JSONResponse({"checkpoints": [_checkpoint(checkpoint) for checkpoint in found]})

    async def list_all_checkpoints(self, request: HttpRequest) -> Response:
        offset, limit = _page(request)
        store = self._service.checkpoints
        found = sorted((c for run_id in store.run_ids() for c in store.of_run(run_id)), key=lambda c: -c.created)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return JSONResponse({"checkpoints": [_checkpoint(c) for c in found[offset : offset + limit]], "cursor": cursor})

    async def set_ttl(self, request: HttpRequest) -> Response:
        body = await _read(request, bodies.SetTtl)
        await asyncio.to_thread(self._service.checkpoints.set_ttl, _path(request), body.ttl_seconds)
        return JSONResponse({})

    async def delete_checkpoint(self, request: HttpRequest) -> Response:
        self._service.checkpoints.delete(_path(request))
        return Response(status_code=204)

    async def archive(self, request: HttpRequest) -> Response:
        """All files of a checkpoint as one tar file."""
        found = await asyncio.to_thread(self._service.checkpoints.find, _path(request), check=True)
        packed = await asyncio.to_thread(_pack, found)
        name = f"{found.path.name}.tar"
        end = BackgroundTask(packed.close)
        return FileResponse(packed.name, filename=name, media_type="application/x-tar", background=end)

    async def file_urls(self, request: HttpRequest) -> Response:
        found = await asyncio.to_thread(self._service.checkpoints.find, _path(request), check=True)
        here = str(request.url).removesuffix("/external_weights_urls")
        urls = {file.name: f"{here}/files/{file.name}" for file in sorted(found.folder.iterdir())}
        return JSONResponse({"urls": urls, "expires": _time(time.time() + 3600)})

    async def file(self, request: HttpRequest) -> Response:
        found = self._service.checkpoints.find(_path(request))
        names = {file.name: file for file in found.folder.iterdir() if file.is_file()}
        name = request.path_params["file"]
        if name not in names:
            raise NotHere(f"{found.path} has no file {name!r}; it has {', '.join(sorted(names))}")
        return FileResponse(names[name])

    def _run(self, run_id: str) -> dict[str, Any]:
        folder = self._service.checkpoints.run(run_id)
        about = folder.record["tinker"]
        found = [_checkpoint(checkpoint) for checkpoint in self._service.checkpoints.of_run(run_id)]
        last = {c["checkpoint_type"]: c for c in found}  # the newest of each comes last
        changed = folder.metrics_file if folder.metrics_file.exists() else folder.record_file
        rank, metadata = int(about["spec"]["rank"]), about.get("user_metadata") or {}
        return {
            "training_run_id": run_id, "base_model": about["base_model"], "model_owner": "palestra",
            "is_lora": rank > 0, "lora_rank": rank, "corrupted": False,
            "last_request_time": _time(changed.stat().st_mtime), "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": {key: v if isinstance(v, str) else json.dumps(v) for key, v in metadata.items()},
        }  # fmt: skip


_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


async def _read(request: HttpRequest, model: type[Body], limit_mib: int = 1) -> Body:
    request.state.body = await read_body(request, limit_mib * MIB)
    return parse(model.model_validate_json, request.state.body)


async def _result(future: Future[Result], seconds: float) -> Result | Exception | None:
    """What came of it; None if nothing has yet."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), seconds)
    except TimeoutError:
        return None
    except Exception as error:
        return error


def _promise(request: Request, **more: Any) -> Response:
    return JSONResponse({"request_id": request.id, **more})


def _path(request: HttpRequest) -> TinkerPath:
    parts = request.path_params
    return TinkerPath.parse(f"tinker://{parts['run_id']}/{parts['kind']}/{parts['name']}")


def _page(request: HttpRequest) -> tuple[int, int]:
    try:
        offset, limit = (int(request.query_params.get(*pair)) for pair in (("offset", 0), ("limit", 20)))
    except ValueError:
        raise refuse(400, "offset and limit are whole numbers") from None
    if offset < 0 or not 1 <= limit <= 10_000:
        raise refuse(400, f"offset={offset} and limit={limit}; expected 0 or more, and 1 to 10000")
    return offset, limit


def _checkpoint(found: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{found.path.kind}/{found.path.name}", "checkpoint_type": _TYPES[found.path.kind],
        "time": _time(found.created), "tinker_path": str(found.path), "size_bytes": found.size_bytes,
        "public": False, "user_metadata": found.user_metadata,
        "expires_at": None if found.expires is None else _time(found.expires),
    }  # fmt: skip


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _pack(found: Checkpoint) -> Any:
    packed = tempfile.NamedTemporaryFile(suffix=".tar")  # noqa: SIM115  # closed when it was sent
    with tarfile.open(packed.name, "w") as tar:
        for file in sorted(found.folder.iterdir()):
            tar.add(file, arcname=file.name)
    return packed


def _can_unpack_zstd() -> bool:
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True
