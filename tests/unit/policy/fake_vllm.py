"""A small server that answers as `vllm serve` does, over our own engine: enough of vLLM for its policy, in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from palestra.core.types import SamplingParams
from palestra.core.weights import Weights
from palestra.policy.local import LocalPolicy
from palestra.serve.web import Server, open_port, url_of

_RENAMED = {"max_tokens": "max_new_tokens"}
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


@dataclass
class FakeVllm:
    """`calls` are the paths that change it, in their order; `forgets` lets it answer and keep its old weights."""

    policy: LocalPolicy
    tokenizer: Any
    context: int
    extension: bool = True
    forgets: bool = False
    calls: list[str] = field(default_factory=list)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/collective_rpc", self.rpc, methods=["POST"]),
        ]
        paths = ("pause", "resume", "reset_prefix_cache", "sleep", "wake_up")
        return Starlette(routes=[*routes, *(Route(f"/{path}", self.control, methods=["POST"]) for path in paths)])

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "the-model", "max_model_len": self.context}]})

    async def tokenize(self, request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse({"tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids})

    async def complete(self, request: Request) -> JSONResponse:
        body = await request.json()
        assert (body["model"], body["ignore_eos"], body["return_token_ids"], body["logprobs"]) == (
            "the-model",
            True,
            True,
            0,
        )
        if len(body["prompt"]) + body["max_tokens"] > self.context:
            return JSONResponse({"error": "maximum context length"}, status_code=400)
        sampling = {_RENAMED.get(name, name): body[name] for name in _SAMPLING}
        params = SamplingParams(**sampling, stop_token_ids=tuple(body["stop_token_ids"]), stop=tuple(body["stop"]))
        session = self.policy.open(body["prompt"])
        try:
            turn = await self.policy.sample(session, params)
        finally:
            self.policy.close(session)
        choice = {
            "token_ids": turn.token_ids.tolist(),
            "logprobs": {"token_logprobs": turn.logprobs.astype(float).tolist()},
            "finish_reason": turn.finish,
        }
        return JSONResponse({"choices": [choice]})

    async def rpc(self, request: Request) -> JSONResponse:
        body = await request.json()
        method = body["method"]
        if method.startswith("palestra_") and not self.extension:
            return JSONResponse({"error": f"no method {method}"}, status_code=500)
        if method != "palestra_version":
            self.calls.append(method)
            weights = Weights.load(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            if not self.forgets:
                try:
                    self.policy.update(weights)
                except Exception as error:
                    return JSONResponse({"error": str(error)}, status_code=500)
        return JSONResponse({"results": [None]})

    async def control(self, request: Request) -> Response:
        self.calls.append(request.url.path.strip("/") + (f"?{request.url.query}" if request.url.query else ""))
        return Response()  # as vLLM 0.24 does; 0.28 says a word of JSON


@contextmanager
def served(fake: FakeVllm) -> Iterator[str]:
    server, sock = Server(fake.app()), open_port("127.0.0.1", 0, None)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield url_of(sock)
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
