"""A gateway worker: it answers the HTTP requests of some groups of attempts, and the trainer's policy samples.

Started by `GatewayWorkers` as `python -m palestra.servers.gateway.worker`. Standard input is the socket of its
channel to the trainer; the process ends when that is closed. It imports no torch, and has no keys in its environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import socket
import sys
import traceback
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.core.channel import Channel, LogToChannel
from palestra.core.machine import interpreter_for_many_rollouts
from palestra.core.secrets import hide_memory
from palestra.core.types import Problem, SamplingParams
from palestra.policy.base import TokenLogprobs
from palestra.policy.channel import ChannelPolicy
from palestra.servers.gateway.app import OpenAttempts, gateway_app
from palestra.servers.gateway.attempt import Attempt
from palestra.servers.gateway.shared_prompts import SharedPrompts
from palestra.servers.openai.completer import Completer
from palestra.servers.web import Server

_ATTEMPT = re.compile("/attempt/([^/]+)")


class WorkerPolicy(ChannelPolicy):
    """The trainer's policy and completer at the other end of the channel."""

    def note_request(self, choices: int, params: SamplingParams) -> None:
        """Call `Completer.on_request` of the trainer."""
        self.channel.send("request", choices, params)

    async def score(
        self, token_ids: Sequence[int], start: int, *, top: int = 0, temperature: float = 1.0
    ) -> AsyncIterator[TokenLogprobs]:
        """Call `Completer.score` of the trainer."""
        yield await self.channel.call("score", array("i", token_ids).tobytes(), start, top, temperature)[1]


class Worker:
    """The attempts of one process, and the handlers of the trainer's messages."""

    def __init__(self, to_trainer: socket.socket) -> None:
        self.policy = WorkerPolicy()
        self._attempts = OpenAttempts[Attempt]()
        self._groups: dict[int, SharedPrompts] = {}
        self._model: Completer
        self._tasks: set[asyncio.Task[None]] = set()
        methods = (self._start, self._group, self._close_group, self._open_attempt, self._finish)
        handlers = {method.__name__[1:]: method for method in methods}
        self.channel = Channel(to_trainer, {**handlers, **self.policy.handlers}, lambda: os._exit(0))
        self.policy.channel = self.channel

    def app(self) -> ASGIApp:
        return self._after_the_trainer(gateway_app(self._attempts.find))

    def _start(self, settings: dict[str, Any]) -> None:
        """Make the completer from what `GatewayWorkers.start` sends."""
        try:
            self.policy.can_branch = settings["can_branch"]
            tokenizer, score = (
                pickle.loads(settings["tokenizer"]),
                self.policy.score if settings["has_scores"] else None,
            )
            size = settings["context_tokens"], score, settings["vocabulary"]
            self._model = Completer(self.policy, tokenizer, settings["name"], *size)
            self._model.unexpected_calls = settings["unexpected_calls"]
            if settings["watches_requests"]:
                self._model.on_request = self.policy.note_request
            _ = self._model.twin  # copying a large tokenizer later would hold up the event loop
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _group(self, number: int, siblings: int) -> None:
        self._groups[number] = SharedPrompts(self.policy, siblings)

    def _close_group(self, number: int) -> None:
        self._groups.pop(number).close()

    def _open_attempt(self, problem_id: str, group: int, options: dict[str, Any]) -> None:
        prompts = self._groups[group]
        attempt = Attempt(
            Problem(problem_id, ""), self._model, "", shared_prompts=prompts, on_end=self._attempts.forget, **options
        )
        self._attempts.add(attempt)

    def _finish(self, call: int, attempt_id: str) -> None:
        async def reply() -> None:
            try:
                attempt = self._attempts[attempt_id]
                rollout = await attempt.finish()
            except Exception as error:
                self.channel.fail(call, error)
            else:
                self.channel.reply(call, rollout, astuple(attempt.counts))

        task = asyncio.ensure_future(reply())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _after_the_trainer(self, app: ASGIApp) -> ASGIApp:
        """A request for an unknown attempt may have overtaken the message that opens it: it waits for the trainer."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            match = _ATTEMPT.match(scope["path"]) if scope["type"] == "http" else None
            if match is not None and match[1] not in self._attempts:
                await self.channel.call("ping")[1]
            await app(scope, receive, send)

        return answer


async def main() -> None:
    import transformers

    _ = transformers.PreTrainedTokenizerFast  # is imported while the trainer prepares its engine
    to_trainer = socket.socket(fileno=sys.stdin.fileno())
    _, handles, _, _ = socket.recv_fds(to_trainer, 1, 1)
    worker = Worker(to_trainer)
    logging.basicConfig(handlers=[LogToChannel(worker.channel)], level=logging.WARNING, format="%(message)s")
    with interpreter_for_many_rollouts():
        await Server(worker.app()).serve(sockets=[socket.socket(fileno=handles[0])])  # until the channel is closed


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers imports it if it can: seconds, and memory
    hide_memory()  # the trainer trusts what it sends
    asyncio.run(main())
