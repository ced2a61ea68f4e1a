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

from starlette.routing import BaseRoute

from palestra.core.files import scratch_root
from palestra.core.types import Problem, SamplingParams
from palestra.rollout.collect import seed_of
from palestra.servers.forwarding import ForwardedAgent
from palestra.servers.gateway.app import gateway_app
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.shared_prompts import SharedPrompts
from palestra.servers.http_errors import refuse
from palestra.servers.openai.completer import Completer
from palestra.servers.web import Server, open_port, reachable_url

_ENDED = 20_000


class Gateway:
    """A server in the sampling event loop: it pauses with that loop, so nothing is sampled during an update.

    A `host` other than loopback needs a `token`, which clients send to take a case (`POST /attempts`).
    With `client_sampling`, requests set temperature, top_p, … and seed; otherwise the run does. With `unix_socket` it
    also listens at `socket_path`, for programs without network.
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
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._client_sampling = client_sampling
        self._by_id: dict[str, Attempt | ForwardedAgent] = {}  # the open ones
        self._by_key: dict[str, Attempt | ForwardedAgent] = {}
        self._ended: dict[str, None] = {}  # ids and keys of the last attempts
        self._socket = open_port(host, port, token)
        self._folder = (
            tempfile.TemporaryDirectory(prefix="palestra-gateway-", dir=scratch_root()) if unix_socket else None
        )
        self._unix_socket = None if self._folder is None else socket.socket(socket.AF_UNIX)
        if self._unix_socket is not None:
            self._unix_socket.bind(self.socket_path)
        self._server = Server(gateway_app(self._find, routes, token))
        self._task: asyncio.Task[None] | None = None
        self.url = reachable_url(host, self._socket)

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def socket_path(self) -> str:
        return "" if self._folder is None else str(Path(self._folder.name, "socket"))

    async def start(self) -> None:
        """Answer from now on, as a task of the running event loop."""
        if self._task is None:
            _ = self._model.twin  # copying a large tokenizer later would hold up the event loop
            sockets = [each for each in (self._socket, self._unix_socket) if each is not None]
            self._task = asyncio.create_task(self._server.serve(sockets=sockets))
            while not self._server.started and not self._task.done():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        """End all attempts, and the server."""
        for attempt in list(self._by_id.values()):
            await attempt.finish()
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
        if self._unix_socket is not None and self._folder is not None:
            self._unix_socket.close()
            self._folder.cleanup()

    def open(
        self,
        problem: Problem,
        *,
        seed_key: str,
        key: str | None = None,
        sampling: SamplingParams | None = None,
        shared_prompts: SharedPrompts | None = None,
        model: Completer | None = None,
    ) -> Attempt:
        """A new attempt. The same seed key (run's seed, problem's number, sibling) gives the same turns.

        With the `shared_prompts` of a group, what its siblings open with is computed once. Another `model` than the
        gateway's is sampled as the requests ask.
        """
        attempt = Attempt(
            problem,
            model or self._model,
            self.url,
            sampling=sampling or self._sampling,
            seed=seed_of(seed_key),
            key=key,
            client_sampling=self._client_sampling or model is not None,
            shared_prompts=shared_prompts,
            on_end=self._forget,
        )
        self._by_id[attempt.id] = self._by_key[attempt.api_key] = attempt
        return attempt

    def open_elsewhere(self, upstream: str, model: str | None, key: str | None) -> ForwardedAgent:
        """An agent whose requests are passed on to `upstream`."""
        agent = ForwardedAgent(self.url, upstream, model, key, self._forget)
        self._by_id[agent.id] = self._by_key[agent.api_key] = agent
        return agent

    def shared_prompts(self, siblings: int) -> SharedPrompts:
        """The prompts shared by `siblings` attempts at one problem; close them when the attempts have ended."""
        return SharedPrompts(self._model.policy, siblings)

    def _forget(self, attempt: Attempt | ForwardedAgent) -> None:
        """Forget an attempt, except that it existed."""
        del self._by_id[attempt.id], self._by_key[attempt.api_key]
        self._ended |= {attempt.id: None, attempt.api_key: None}
        while len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]

    def _find(self, attempt_id: str | None, key: str | None) -> Attempt | ForwardedAgent:
        """Find an attempt by its URL or its key. A key opens no other attempt, and none that has ended.

        With the URL, which cannot be guessed, any key of no attempt is accepted: some clients send their own.
        """
        if attempt_id in self._ended or key in self._ended:
            raise refuse(401, "this attempt has ended; its key is not valid any more")
        by_key = self._by_key.get(key or "")
        attempt = by_key if attempt_id is None else self._by_id.get(attempt_id)
        if attempt is None:
            what = "the API key" if attempt_id is None else "the attempt in the URL"
            raise refuse(401, f"{what} belongs to no attempt; use the base URL and the key that the attempt was given")
        if by_key is not None and by_key is not attempt:
            raise refuse(401, "the API key belongs to another attempt than the URL")
        return attempt
