"""Attempts by external agents: they take a case over HTTP, run wherever they like, and post a reward.

POST /attempts (from other machines with the server's token) → id, case, URLs, api_key, timeout_s; 204: none now
POST /attempts/<id>/reward {"reward": 0.5, "result": …}, with the attempt's key as bearer token

Without a training (`StandaloneGateway`) the client may bring the case, {"input": …, "seed": 0}; without a body it is
the next of --cases. Rewards end attempts, and the rollouts go to a file.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.agents.programs import Endpoint, ProgramAgent, ProgramLimits
from palestra.core.files import append_jsonl
from palestra.core.group_codec import rollout_to_dict
from palestra.core.messages import as_messages
from palestra.core.types import Problem, ProgramResult, SamplingParams, Score
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.workers import WorkerAttempt
from palestra.servers.openai.completer import Completer
from palestra.servers.web import MIB, parse, read_body, refuse, while_connected
from palestra.sources.programs.runner import case_of, hidden_columns

TAKE_WAIT_S = 20.0  # how long a request for a case is held until there is one
MAX_BODY = 4 * MIB
MAX_OPEN = 4096  # attempts


class RewardBody(BaseModel):
    """The body of a posted reward: `result` is for the measures; `error` marks the attempt as failed."""

    model_config = ConfigDict(extra="forbid")
    reward: float | None = Field(None, allow_inf_nan=False)
    result: Any = None
    error: str | None = None


@dataclass(eq=False, slots=True)
class _Offer:
    """An attempt that waits to be taken, or was taken."""

    case: Mapping[str, Any]
    endpoint: Endpoint
    limits: ProgramLimits
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    posted: asyncio.Future[RewardBody] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass
class OutsideAgent(ProgramAgent):
    """External agents. Each case waits until one of them takes it; then its time-out runs."""

    posts_reward: ClassVar[bool] = True
    _waiting: list[_Offer] = field(default_factory=list, init=False, repr=False)
    _taken: dict[str, _Offer] = field(default_factory=dict, init=False, repr=False)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition, init=False, repr=False)

    async def run(self, case: Mapping[str, Any], endpoint: Endpoint, limits: ProgramLimits) -> ProgramResult:
        offer = _Offer(case, endpoint, limits)
        async with self._news:
            self._waiting.append(offer)
            self._news.notify()
        try:
            await offer.taken.wait()
            began = time.monotonic()
            try:
                body = await asyncio.wait_for(offer.posted, limits.timeout_s)
            except TimeoutError:
                return ProgramResult(stopped="time", seconds=limits.timeout_s)
            return ProgramResult(
                int(body.error is not None),
                stderr=body.error or "",
                error=body.error,
                seconds=time.monotonic() - began,
                result=body.result,
                reward=body.reward,
            )
        finally:
            self._taken.pop(endpoint.attempt_id, None)
            if offer in self._waiting:
                self._waiting.remove(offer)

    def routes(self) -> Sequence[Route]:
        return attempt_routes(self._take, self._reward)

    async def _take(self, request: Request) -> Response:
        offer = await while_connected(request, self._next())
        if offer is None:
            return Response(status_code=204)
        offer.taken.set()
        return case_answer(request, offer.case, offer.endpoint, timeout_s=offer.limits.timeout_s)

    async def _next(self) -> _Offer | None:
        """The offer that has waited longest; None if there is none within TAKE_WAIT_S."""
        try:
            async with asyncio.timeout(TAKE_WAIT_S), self._news:
                await self._news.wait_for(lambda: bool(self._waiting))
                offer = self._waiting.pop(0)
                self._taken[offer.endpoint.attempt_id] = offer
                return offer
        except TimeoutError:
            return None

    async def _reward(self, request: Request) -> Response:
        offer = self._taken.get(request.path_params["id"])
        body = await read_reward(request, None if offer is None else offer.endpoint.api_key)
        if offer is not None and not offer.posted.done():
            offer.posted.set_result(body)
        return JSONResponse({"id": request.path_params["id"]})


def attempt_routes(take: Callable[..., Any], reward: Callable[..., Any]) -> list[Route]:
    return [
        Route("/attempts", take, methods=["POST"]),
        Route("/attempts/{id}/reward", reward, methods=["POST"]),
    ]


def case_answer(request: Request, case: Mapping[str, Any], endpoint: Endpoint, **more: Any) -> Response:
    """The answer to an agent that takes a case. The URLs have the address by which it has reached this server: in a
    container, or behind a forwarded port, that is not the one that the server knows."""

    def where(agent: Endpoint) -> dict[str, str]:
        if host := request.headers.get("host"):
            agent = replace(agent, base_url=f"{request.url.scheme}://{host}{urlsplit(agent.base_url).path}")
        return {"base_url": agent.base_url, "anthropic_base_url": agent.anthropic_url, "api_key": agent.api_key}

    if endpoint.agents:
        more["agents"] = {label: where(agent) for label, agent in endpoint.agents.items()}
    return JSONResponse({"id": endpoint.attempt_id, "case": dict(case), **where(endpoint), **more})


async def read_reward(request: Request, api_key: str | None) -> RewardBody:
    """Read a posted reward; 401 if the key is not `api_key` (None: no attempt of this id is open)."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if api_key is None or not hmac.compare_digest(key.encode(), api_key.encode()):
        raise refuse(401, "no attempt of this id is open with this key; send the attempt's api_key as bearer token")
    return parse(RewardBody.model_validate_json, await read_body(request, MAX_BODY), 400)


class AttemptBody(BaseModel):
    """The case to attempt. The same seed and input give the same turns."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = None
    input: str | list[dict[str, Any]] = ""
    seed: int | None = None


class StandaloneGateway:
    """Attempts that clients open and end. Requests decide temperature, top_p and seed."""

    def __init__(
        self, model: Completer, file: Path, *, cases: Sequence[Problem] = (), max_new_tokens: int = 1024, **address: Any
    ) -> None:
        """`address`: host, port and token of the gateway."""
        routes = attempt_routes(self._open, self._reward)
        self.gateway = Gateway(model, SamplingParams(max_new_tokens), client_sampling=True, routes=routes, **address)
        self._file = file
        self._cases = iter(cases)
        self._hidden = hidden_columns(cases)
        self._open_attempts: dict[str, Attempt | WorkerAttempt] = {}
        self._numbers = itertools.count()

    async def _open(self, request: Request) -> Response:
        raw = await read_body(request, MAX_BODY)
        if len(self._open_attempts) >= MAX_OPEN:
            raise refuse(429, f"{MAX_OPEN} attempts are open, which is the limit; end some by posting their rewards")
        number = next(self._numbers)
        body = parse(AttemptBody.model_validate_json, raw or b"{}", 400)
        if body.input:
            prompt = body.input if isinstance(body.input, str) else as_messages(body.input)
            problem: Problem | None = Problem(body.id or f"attempt-{number}", prompt)
        else:
            problem = next(self._cases, None)
        if problem is None:
            raise refuse(404, 'there is no case left to take; send one: {"input": …}')
        attempt = self.gateway.open(problem, seed_key=f"{number if body.seed is None else body.seed}")
        self._open_attempts[attempt.id] = attempt
        endpoint = Endpoint(attempt.base_url, attempt.api_key, attempt.id)
        return case_answer(request, case_of(problem, self._hidden), endpoint)

    async def _reward(self, request: Request) -> Response:
        attempt = self._open_attempts.get(request.path_params["id"])
        body = await read_reward(request, None if attempt is None else attempt.api_key)
        attempt = self._open_attempts.pop(request.path_params["id"], None)
        if attempt is None:  # while this body was read
            raise refuse(401, "this attempt has ended: another reward for it came first")
        rollout = await attempt.finish()
        if body.reward is not None:
            posted = Score(body.reward, body.reward >= 1.0, "posted by the agent")
            rollout = replace(rollout, reward=body.reward, scores={"reward": posted})
        rollout = replace(rollout, error=body.error)
        append_jsonl(self._file, [rollout_to_dict(rollout)])
        return JSONResponse({"id": attempt.id, "rows": len(rollout.conversations) if rollout.turns else 0})
