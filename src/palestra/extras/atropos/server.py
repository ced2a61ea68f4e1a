"""The trajectory API: environments post scored groups, a trainer takes batches. The HTTP around an Exchange.

Beyond the protocol, for delivery exactly once: a post may carry an `Idempotency-Key`, and is then accepted once
however often it is repeated; `/batch?after=N&saved=M&step=S` names the last batch that the trainer has, the last one
in a checkpoint and the trainer's step, so that a lost response can be repeated and a killed trainer gets its batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from palestra.core.codec import decode, encode
from palestra.core.secrets import clean_environment
from palestra.extras.atropos.exchange import Exchange, PostedGroup, QueueFull, UnknownEnv
from palestra.extras.atropos.protocol import EnvIdentifier, EnvRegistration, Registration, ScoredGroup
from palestra.servers.web import MIB, Tally, make_app, parse, read_body, read_model, refuse

_ABSENT = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params", "inference_logprobs",
           "messages", "images")  # fmt: skip

_MAX_KEY = 256
_LARGE = 4 * MIB
_LARGE_AT_ONCE = 4
_GROUPS = TypeAdapter(list[ScoredGroup])

Handler = Callable[[Request], Awaitable[dict[str, Any] | Response]]


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

    # the protocol's own clients change by GET, too; the guard refuses that from web pages
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
    answered = [Route(path, _answered(handler), methods=methods) for path, handler, methods in routes]
    app = make_app(answered, token=token, lifespan=lifespan)
    app.state.exchange = exchange
    return app


def _answered(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The exchange's refusals as HTTP statuses. A client of the protocol repeats a 5xx and drops what got a 4xx."""

    async def answer(request: Request) -> Response:
        try:
            found = await handler(request)
            return found if isinstance(found, Response) else JSONResponse(found)
        except QueueFull as full:
            raise refuse(503, str(full), retry_after_s=1) from None
        except UnknownEnv as unknown:
            raise refuse(404, str(unknown)) from None
        except sqlite3.Error as error:
            reason = f"the journal cannot be written ({error}); nothing was accepted"
            raise refuse(503, reason, retry_after_s=5) from None

    return answer


def _batch_number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise refuse(422, f"{name}={text[:20]!r}; expected the number of a batch, 0 for none")
    return None if text is None else int(text)


class _Api:
    def __init__(self, exchange: Exchange, max_body: int) -> None:
        self._exchange = exchange
        self._posts = PostReader(max_body)

    async def root(self, request: Request) -> dict[str, Any]:
        return {"message": "Palestra trajectory API"}

    async def register(self, request: Request) -> dict[str, Any]:
        return {"uuid": await self._exchange.register(await read_model(request, Registration))}

    async def register_env(self, request: Request) -> dict[str, Any]:
        env = await self._exchange.register_env(await read_model(request, EnvRegistration))
        if env is None:
            return {"status": "wait for trainer to start"}
        settings = self._exchange.registration
        assert settings is not None
        return {
            "status": "success",
            "env_id": env.id,
            "wandb_name": env.name,
            "checkpoint_dir": settings.checkpoint_dir,
            "starting_step": self._exchange.step,
            "checkpoint_interval": settings.save_checkpoint_interval,
            "num_steps": settings.num_steps,
        }

    async def disconnect_env(self, request: Request) -> dict[str, Any]:
        await self._exchange.disconnect_env((await read_model(request, EnvIdentifier)).env_id)
        return {"status": "success"}

    async def wandb_info(self, request: Request) -> dict[str, Any]:
        settings = self._exchange.registration
        return {name: getattr(settings, f"wandb_{name}", None) for name in ("group", "project")}

    async def info(self, request: Request) -> dict[str, Any]:
        return {name: getattr(self._exchange.registration, name, -1) for name in ("batch_size", "max_token_len")}

    async def scored_data(self, request: Request) -> dict[str, Any]:
        return {"status": await self._accept(request, await self._posts.read(request))}

    async def scored_data_list(self, request: Request) -> dict[str, Any]:
        groups = await self._posts.read(request, is_list=True)
        return {"status": await self._accept(request, groups), "groups_processed": len(groups)}

    async def _accept(self, request: Request, groups: list[PostedGroup]) -> str:
        key = request.headers.get("idempotency-key")
        if key is not None and len(key) > _MAX_KEY:
            raise refuse(400, f"the Idempotency-Key has {len(key)} characters; up to {_MAX_KEY} are kept")
        return "received" if await self._exchange.add(groups, key) else "received before"

    async def batch(self, request: Request) -> dict[str, Any] | Response:
        after, saved, step = (_batch_number(request, name) for name in ("after", "saved", "step"))
        if self._exchange.registration is None:
            return {"batch": None, "status": "error", "message": "no trainer is registered; call POST /register first"}
        delivery = await self._exchange.take(after, saved, step)
        if delivery is None:
            reason = self._exchange.why_no_batch()
            return {"batch": None, **({"message": reason} if reason else {})}
        body = b'{"number": %d, "batch": [%s]}' % (delivery.number, b", ".join(delivery.groups))
        return Response(body, media_type="application/json")

    async def status(self, request: Request) -> dict[str, Any]:
        tally: Tally = request.app.state.tally
        return {
            "current_step": self._exchange.step,
            "queue_size": len(self._exchange.waiting),
            "environments": sum(env.connected for env in self._exchange.envs),
            "groups_accepted": self._exchange.accepted,
            "posts_refused": tally.refused,
            "last_refusal": tally.reason,
        }

    async def status_env(self, request: Request) -> dict[str, Any]:
        return self._exchange.env_status((await read_model(request, EnvIdentifier)).env_id)

    async def latest_example(self, request: Request) -> dict[str, Any] | Response:
        if self._exchange.latest is None:
            return {name: [] for name in _ABSENT}
        return Response(self._exchange.latest, media_type="application/json")

    async def reset_data(self, request: Request) -> Response:
        await self._exchange.reset()
        return PlainTextResponse("Reset successful")


class PostReader:
    """Reads posts of one group or of a list; few large ones at once, so that their bodies do not add up.

    Large bodies are parsed in a child process (`python -m palestra.extras.atropos.server one|list`): the parser holds
    the interpreter's lock and needs thirty times the body's memory, so 100 MiB would block all clients for ten seconds.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._reading = asyncio.Semaphore(_LARGE_AT_ONCE)
        self._parsing = asyncio.Semaphore(1)

    async def read(self, request: Request, *, is_list: bool = False) -> list[PostedGroup]:
        size = request.headers.get("content-length", "")
        if size.isdecimal() and int(size[:12]) <= _LARGE and "content-encoding" not in request.headers:
            return _parse(await read_body(request, self._max_body), is_list)
        async with self._reading:
            body = await read_body(request, self._max_body)
            if len(body) <= _LARGE:
                return _parse(body, is_list)
            async with self._parsing:
                return await _parse_apart(body, is_list)


def _parse(body: bytes, is_list: bool) -> list[PostedGroup]:
    groups = parse(_GROUPS.validate_json, body) if is_list else [parse(ScoredGroup.model_validate_json, body)]
    return [PostedGroup.of(group) for group in groups]


async def _parse_apart(body: bytes, is_list: bool) -> list[PostedGroup]:
    command = [sys.executable, "-P", "-m", "palestra.extras.atropos.server", "list" if is_list else "one"]
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=null, env=clean_environment(), start_new_session=True
    )
    try:
        output, _ = await process.communicate(body)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0 or not output:
        raise refuse(413, "the body could not be parsed in the memory that there is; send less at once")
    answer: list[PostedGroup] | str = decode(output, list[PostedGroup] | str)
    if isinstance(answer, str):
        raise refuse(422, answer)
    return answer


def main() -> None:
    try:
        answer: Any = _parse(sys.stdin.buffer.read(), sys.argv[1] == "list")
    except HTTPException as error:
        answer = error.detail
    sys.stdout.buffer.write(encode(answer))


if __name__ == "__main__":
    main()
