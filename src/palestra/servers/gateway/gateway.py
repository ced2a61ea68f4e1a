"""The recording gateway: attempts are opened, agents call the model by HTTP, and each attempt ends as a rollout.

>>> gateway = Gateway(completer, SamplingParams(max_new_tokens=256))      # doctest: +SKIP
>>> await gateway.start()
>>> attempt = gateway.open(problem, seed_key="0/17/3")
>>> client = openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key)
>>> await client.chat.completions.create(model="any", messages=[…])
>>> rollout = await attempt.finish()                                      # with a lineage per conversation
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from palestra.core.files import scratch_root
from palestra.core.types import Problem, SamplingParams
from palestra.rollout.collect import seed_of
from palestra.servers.forwarding import ForwardedAgent
from palestra.servers.gateway.app import OpenAttempts, gateway_app
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.conversation_tree import SharedPrompts
from palestra.servers.gateway.workers import GatewayWorkers, WorkerAttempt, WorkerPrompts
from palestra.servers.openai.completer import Completer
from palestra.servers.web import Server, open_port, reachable_url


class Gateway:
    """A server in the sampling event loop: it pauses with that loop, so nothing is sampled during an update.

    A `host` other than loopback needs a `token`, which clients send to take a case (`POST /attempts`).
    With `client_sampling`, requests set temperature, top_p, … and seed; otherwise the run does. With `unix_socket` it
    also listens at `socket_path`, for programs without network. With `workers` above 0, child processes answer the
    requests for its own model; only sampling and requests to the gateway's own URL take time of this process.
    """

    def __init__(
        self,
        model: Completer,
        sampling: SamplingParams,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        client_sampling: bool = False,
        routes: Sequence[BaseRoute] = (),
        unix_socket: bool = False,
        workers: int = 0,
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._client_sampling = client_sampling
        self._attempts = OpenAttempts[Attempt | ForwardedAgent]()
        self._sockets = [open_port(host, port, token)]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if unix_socket:
            self._folder = tempfile.TemporaryDirectory(prefix="palestra-gateway-", dir=scratch_root())
            self._sockets.append(socket.socket(socket.AF_UNIX))
            self._sockets[1].bind(self.socket_path)
        self._server = Server(gateway_app(self._attempts.find, routes, token))
        self._task: asyncio.Task[None] | None = None
        self.url = reachable_url(host, self._sockets[0])
        self.workers = GatewayWorkers(workers, host)

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    @property
    def socket_path(self) -> str:
        return "" if self._folder is None else str(Path(self._folder.name, "socket"))

    async def start(self) -> None:
        """Answer from now on, as a task of the running event loop."""
        if self._task is None:
            _ = self._model.twin  # copying a large tokenizer later would hold up the event loop
            self.workers.start(self._model)
            self._task = asyncio.create_task(self._server.serve(sockets=self._sockets))
            while not self._server.started and not self._task.done():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        """End all attempts, and the server."""
        try:
            for attempt in self._attempts:
                await attempt.finish()
        finally:
            self.workers.close()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        for each in self._sockets:
            each.close()
        if self._folder is not None:
            self._folder.cleanup()

    def open(
        self,
        problem: Problem,
        *,
        seed_key: str,
        key: str | None = None,
        sampling: SamplingParams | None = None,
        shared_prompts: SharedPrompts | WorkerPrompts | None = None,
        model: Completer | None = None,
    ) -> Attempt | WorkerAttempt:
        """A new attempt. The same seed key (run's seed, problem's number, sibling) gives the same turns.

        With the `shared_prompts` of a group, what its siblings open with is computed once. Another `model` than the
        gateway's is sampled as the requests ask.
        """
        options: dict[str, Any] = {"sampling": sampling or self._sampling, "seed": seed_of(seed_key)}
        options |= {"api_key": key} if key else {}
        options |= {"client_sampling": self._client_sampling or model is not None, "on_end": self._attempts.forget}
        attempt: Attempt | WorkerAttempt
        if shared_prompts is None and model is None and (own := self.workers.prompts(1)) is not None:

            def end(ended: WorkerAttempt) -> None:
                self._attempts.forget(ended)
                own.close()

            shared_prompts, options["on_end"] = own, end
        if isinstance(shared_prompts, WorkerPrompts):
            attempt = shared_prompts.open(problem, **options)
        else:
            attempt = Attempt(problem, model or self._model, self.url, shared_prompts=shared_prompts, **options)
        self._attempts.add(attempt)
        return attempt

    def open_elsewhere(self, upstream: str, model: str | None, key: str | None) -> ForwardedAgent:
        """An agent whose requests are passed on to `upstream`."""
        agent = ForwardedAgent(self.url, upstream, model, key, self._attempts.forget)
        self._attempts.add(agent)
        return agent

    def shared_prompts(self, siblings: int) -> SharedPrompts | WorkerPrompts:
        """The prompts shared by `siblings` attempts at one problem; close them when the attempts have ended."""
        return self.workers.prompts(siblings) or SharedPrompts(self._model.policy, siblings)
