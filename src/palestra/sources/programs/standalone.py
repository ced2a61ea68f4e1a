"""The gateway without a training: a client opens an attempt, gets its endpoint, and the rollouts go to a file.

POST /attempts                  {"input": …, "seed": 0}; without a body the next of --cases → as in a training
POST /attempts/<id>/reward      {"reward": 0.5}: ends it; its rollout is a line of the file
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from palestra.agents.programs import Endpoint
from palestra.core.files import append_jsonl
from palestra.core.group_codec import rollout_to_dict
from palestra.core.messages import as_messages
from palestra.core.types import Problem, SamplingParams, Score
from palestra.servers.body import parse, read_body
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.workers import WorkerAttempt
from palestra.servers.openai.completer import Completer
from palestra.servers.web import refuse
from palestra.sources.programs.collector import case_of, hidden_columns
from palestra.sources.programs.outside import MAX_BODY, attempt_routes, case_answer, read_reward

MAX_OPEN = 4096  # attempts


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
