"""The trajectory API: environments post scored groups, a trainer takes batches. The HTTP around an Exchange.

    GET  /                                          POST /register          a trainer
    POST /register-env, /disconnect-env             GET  /status-env        an environment
    POST /scored_data, /scored_data_list            groups in
    POST /batch                                     a batch out: exactly batch_size sequences, or null
    POST /reset_data                                forget everything
    GET  /status, /info, /wandb_info, /latest_example

The protocol's own clients ask for /batch and /reset_data by GET, which stays; the guard refuses it from web pages.
Beyond the protocol, for delivery exactly once: a post may carry an `Idempotency-Key`, and is then accepted once
however often it is repeated; `/batch?after=N&saved=M&step=S` names the last batch that the trainer has, the last one
in a checkpoint and the trainer's step, so that a lost response can be repeated and a killed trainer gets its batches
again. `/status` also says how many groups have arrived, how many posts were refused, and why.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from palestra.serve.body import MIB, read_model
from palestra.serve.http_errors import refuse
from palestra.serve.web import Tally, make_app
from palestra.wire.exchange import Exchange, QueueFull, UnknownEnv
from palestra.wire.posts import PostedGroup, PostReader
from palestra.wire.types import EnvIdentifier, EnvRegistration, Registration

_ABSENT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
           "messages", "images")  # fmt: skip

_MAX_KEY = 256

Handler = Callable[[Request], Awaitable[Response]]


def trajectory_app(
    folder: Path,
    *,
    token: str | None = None,
    max_waiting: int = 65_536,
    max_waiting_mib: int = 4096,
    max_body_mib: int = 128,
) -> Starlette:
    """The API over the journal in `folder`; at most `max_waiting` sequences wait for the trainer."""
    exchange = Exchange(folder, max_waiting, max_waiting_mib)
    api = _Api(exchange, max_body_mib * MIB)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        exchange.close()

    post, get, both = ["POST"], ["GET"], ["GET", "POST"]
    routes: list[tuple[str, Handler, list[str]]] = [
        ("/", api.root, get),
        ("/register", api.register, post),
        ("/register-env", api.register_env, post),
        ("/disconnect-env", api.disconnect_env, post),
        ("/wandb_info", api.wandb_info, get),
        ("/info", api.info, get),
        ("/scored_data", api.scored_data, post),
        ("/scored_data_list", api.scored_data_list, post),
        ("/batch", api.batch, both),
        ("/status", api.status, get),
        ("/status-env", api.status_env, get),
        ("/latest_example", api.latest_example, get),
        ("/reset_data", api.reset_data, both),
    ]
    app = make_app(
        [Route(path, _answered(handler), methods=methods) for path, handler, methods in routes],
        token=token,
        lifespan=lifespan,
    )
    app.state.exchange = exchange
    return app


def _answered(handler: Handler) -> Handler:
    """The exchange's refusals as HTTP statuses. A client of the protocol repeats a 5xx and drops what got a 4xx."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except QueueFull as full:
            raise refuse(503, str(full), retry_after_s=1) from None
        except UnknownEnv as unknown:
            raise refuse(404, str(unknown)) from None
        except sqlite3.Error as error:
            raise refuse(
                503, f"the journal cannot be written ({error}); nothing was accepted", retry_after_s=5
            ) from None

    return answer


def _batch_number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise refuse(422, f"{name}={text[:20]!r}; expected the number of a batch, 0 for none")
    return None if text is None else int(text)


class _Api:
    """One method for each endpoint."""

    def __init__(self, exchange: Exchange, max_body: int) -> None:
        self._exchange = exchange
        self._posts = PostReader(max_body)

    async def root(self, request: Request) -> Response:
        return JSONResponse({"message": "Palestra trajectory API"})

    async def register(self, request: Request) -> Response:
        return JSONResponse({"uuid": await self._exchange.register(await read_model(request, Registration))})

    async def register_env(self, request: Request) -> Response:
        env = await self._exchange.register_env(await read_model(request, EnvRegistration))
        if env is None:
            return JSONResponse({"status": "wait for trainer to start"})
        settings = self._exchange.registration
        assert settings is not None
        return JSONResponse(
            {
                "status": "success",
                "env_id": env.id,
                "wandb_name": env.name,
                "checkpoint_dir": settings.checkpoint_dir,
                "starting_step": self._exchange.step,
                "checkpoint_interval": settings.save_checkpoint_interval,
                "num_steps": settings.num_steps,
            }
        )

    async def disconnect_env(self, request: Request) -> Response:
        await self._exchange.disconnect_env((await read_model(request, EnvIdentifier)).env_id)
        return JSONResponse({"status": "success"})

    async def wandb_info(self, request: Request) -> Response:
        settings = self._exchange.registration
        group, project = (settings.wandb_group, settings.wandb_project) if settings else (None, None)
        return JSONResponse({"group": group, "project": project})

    async def info(self, request: Request) -> Response:
        settings = self._exchange.registration
        batch_size, max_token_len = (settings.batch_size, settings.max_token_len) if settings else (-1, -1)
        return JSONResponse({"batch_size": batch_size, "max_token_len": max_token_len})

    async def scored_data(self, request: Request) -> Response:
        return JSONResponse({"status": await self._accept(request, await self._posts.read(request))})

    async def scored_data_list(self, request: Request) -> Response:
        groups = await self._posts.read(request, is_list=True)
        return JSONResponse({"status": await self._accept(request, groups), "groups_processed": len(groups)})

    async def _accept(self, request: Request, groups: list[PostedGroup]) -> str:
        key = request.headers.get("idempotency-key")
        if key is not None and len(key) > _MAX_KEY:
            raise refuse(400, f"the Idempotency-Key has {len(key)} characters; up to {_MAX_KEY} are kept")
        new = await self._exchange.add(groups, key)
        return "received" if new else "received before"

    async def batch(self, request: Request) -> Response:
        after, saved, step = (_batch_number(request, name) for name in ("after", "saved", "step"))
        if self._exchange.registration is None:
            message = "no trainer is registered; call POST /register first"
            return JSONResponse({"batch": None, "status": "error", "message": message})
        delivery = await self._exchange.take(after, saved, step)
        if delivery is None:
            reason = self._exchange.why_no_batch()
            return JSONResponse({"batch": None} | ({"message": reason} if reason else {}))
        body = b'{"number": %d, "batch": [%s]}' % (delivery.number, b", ".join(delivery.groups))
        return Response(body, media_type="application/json")

    async def status(self, request: Request) -> Response:
        tally: Tally = request.app.state.tally
        return JSONResponse(
            {
                "current_step": self._exchange.step,
                "queue_size": len(self._exchange.waiting),
                "environments": sum(env.connected for env in self._exchange.envs),
                "groups_accepted": self._exchange.accepted,
                "posts_refused": tally.refused,
                "last_refusal": tally.reason,
            }
        )

    async def status_env(self, request: Request) -> Response:
        return JSONResponse(self._exchange.env_status((await read_model(request, EnvIdentifier)).env_id))

    async def latest_example(self, request: Request) -> Response:
        if self._exchange.latest is None:
            return JSONResponse({name: [] for name in _ABSENT})
        return Response(self._exchange.latest, media_type="application/json")

    async def reset_data(self, request: Request) -> Response:
        await self._exchange.reset()
        return PlainTextResponse("Reset successful")
