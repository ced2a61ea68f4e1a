"""Gateway workers: child processes that answer the HTTP requests of whole groups of attempts; the trainer samples.

`GatewayWorkers` starts each as `python -m palestra.servers.gateway.workers`. Standard input is the socket of its
channel to the trainer; the process ends when that is closed. It imports no torch, and has no keys in its environment.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.core import children
from palestra.core.channel import Handlers
from palestra.core.errors import PalestraError, RolloutError, StateError
from palestra.core.machine import processors
from palestra.core.secrets import clean_environment, hide_memory
from palestra.core.types import Problem, Rollout, SamplingParams
from palestra.policy.channel import ChannelPolicy, PolicyServer
from palestra.policy.workers import WorkerProcess, connect_to_trainer, log_record, tokenizer_of, tokenizer_parts
from palestra.servers.forwarding import ForwardedAgent
from palestra.servers.gateway.app import OpenAttempts, gateway_app
from palestra.servers.gateway.attempt import Attempt, AttemptCounts
from palestra.servers.gateway.conversation_tree import SharedPrompts
from palestra.servers.openai.completer import Completer, ignore_request
from palestra.servers.web import Server, open_port, url_of

_MAX_WORKERS = 8
_MIN_PROCESSORS = 4
_BACKLOG = 512
_MAX_LOGGED = 1000  # messages that are remembered
_ATTEMPT = re.compile("/attempt/([^/]+)")
_QUIET = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}  # it says that torch is missing

log = logging.getLogger("palestra")


def default_workers() -> int:
    """The number of workers that leaves half of the processors to the trainer and the agents; 0 on a small machine."""
    count = processors()
    return 0 if count < _MIN_PROCESSORS else min(_MAX_WORKERS, count // 2 - 1)


class WorkerAttempt(ForwardedAgent):
    """An attempt in a worker. Requests that come to the gateway's own URL are forwarded there."""

    def __init__(self, problem: Problem, worker: GatewayWorker, on_end: Callable[[ForwardedAgent], None]) -> None:
        super().__init__(worker.url, "", on_end=on_end)
        self.upstream = self.anthropic_base_url
        self.problem = problem
        self._worker = worker
        self._finished: asyncio.Future[tuple[Rollout, AttemptCounts]] | None = None

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    @property
    def is_lost(self) -> bool:
        return self._worker.lost is not None

    @property
    def counts(self) -> AttemptCounts:
        if self._finished is None or not self._finished.done():
            raise StateError("the counts of an attempt in a gateway worker are known after `await attempt.finish()`")
        return self._finished.result()[1]

    async def finish(self) -> Rollout:  # type: ignore[override]
        """As `Attempt.finish`; a failed rollout with the reason as its error where the worker has ended."""
        if self._finished is None:
            self.on_end(self)
            self._finished = asyncio.ensure_future(self._finish())
        return (await asyncio.shield(self._finished))[0]

    async def _finish(self) -> tuple[Rollout, AttemptCounts]:
        assert self._worker.channel is not None
        try:
            finished: tuple[Rollout, AttemptCounts]
            finished = await self._worker.channel.call("finish", self.id, returns=tuple[Rollout, AttemptCounts])[1]
        except PalestraError as error:
            if error is not self._worker.lost:
                raise
            return Rollout(self.problem.id, (), (), "failed", error=str(error)), AttemptCounts(0, 0, 0, 0, 0, 0, 0)
        return finished


class WorkerPrompts:
    """The `SharedPrompts` of a group whose attempts are in this worker. Close it when they have ended."""

    def __init__(self, worker: GatewayWorker, number: int, siblings: int) -> None:
        self.worker = worker
        self.number = number
        worker.groups += 1
        worker.send("group", number, siblings)

    @property
    def is_lost(self) -> bool:
        return self.worker.lost is not None

    def open(self, problem: Problem, **options: Any) -> WorkerAttempt:
        """Open an attempt in the worker; `options` are those of `Attempt`."""
        attempt = WorkerAttempt(problem, self.worker, options.pop("on_end"))
        attempt.api_key = options.get("api_key", attempt.api_key)
        options |= {"id": attempt.id, "api_key": attempt.api_key}
        self.worker.send("open_attempt", problem.id, self.number, options.pop("sampling"), options)
        return attempt

    def close(self) -> None:
        self.worker.groups -= 1
        self.worker.send("close_group", self.number)


class GatewayWorker(WorkerProcess):
    """A worker process, and its port."""

    def __init__(self, host: str) -> None:
        self.groups = 0  # open ones
        listener = open_port(host, 0, None)
        listener.listen(_BACKLOG)  # requests wait until the process answers them
        self.url = url_of(listener)
        ours, theirs = socket.socketpair()
        with listener, theirs:
            socket.send_fds(ours, [b"\0"], [listener.fileno()])
            command = [sys.executable, "-P", "-m", "palestra.servers.gateway.workers"]
            environment = {**clean_environment(), **_QUIET}
            super().__init__(children.start(command, env=environment, stdin=theirs.fileno(), stdout=2, stderr=2), ours)

    def send(self, kind: str, *values: Any) -> None:
        assert self.channel is not None, "the gateway was not started"
        self.channel.send(kind, *values)

    def explain(self, how: str) -> PalestraError:
        log.error("a gateway worker (process %d) %s, and its open attempts with it", self.process.pid, how)
        return RolloutError(
            f"the gateway worker of this attempt (process {self.process.pid}) {how}; its other attempts failed, too. "
            "Look for its last words in the log, or set agent.gateway_workers to 0"
        )


class GatewayWorkers:
    """The workers of one gateway. Their processes start with it, and import while the engine is prepared."""

    def __init__(self, count: int, host: str) -> None:
        self._workers = [GatewayWorker(host) for _ in range(count)]
        self._numbers = itertools.count()
        self._logged: set[tuple[str, str]] = set()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def start(self, model: Completer) -> None:
        if not self._workers:
            return
        options = {name: getattr(model, name) for name in ("name", "context_tokens", "vocabulary", "unexpected_calls")}
        has = model.policy.can_branch, model.score is not None, model.on_request is not ignore_request

        def asked(choices: int, params: SamplingParams) -> None:
            model.on_request(choices, params)

        for worker in self._workers:
            server = PolicyServer(model.policy, scorer=model.token_logprobs)
            handlers: Handlers = {"log": self._log_once, "request": asked}
            worker.connect(server, handlers, tokenizer_parts(model.tokenizer), options, *has)

    def prompts(self, siblings: int) -> WorkerPrompts | None:
        """The prompts of a new group, in the worker with the fewest groups; None if all workers have ended."""
        running = [worker for worker in self._workers if worker.lost is None]
        least = min(running, key=lambda worker: worker.groups, default=None)
        return None if least is None else WorkerPrompts(least, next(self._numbers), siblings)

    def close(self) -> None:
        for worker in self._workers:
            worker.disconnect()
            worker.end()

    def _log_once(self, logger: str, level: int, text: str) -> None:
        """Log a message of a worker, unless another one has sent the same."""
        if (logger, text) not in self._logged:
            if len(self._logged) < _MAX_LOGGED:
                self._logged.add((logger, text))
            log_record(logger, level, text)


# In the worker process.


class Worker:
    """The attempts of one process, and the handlers of the trainer's messages."""

    def __init__(self, to_trainer: socket.socket) -> None:
        self.policy = ChannelPolicy()
        self._attempts = OpenAttempts[Attempt]()
        self._groups: dict[int, SharedPrompts] = {}
        self._model: Completer
        handlers: Handlers = {
            "group": lambda number, siblings: self._groups.update({number: SharedPrompts(self.policy, siblings)}),
            "close_group": lambda number: self._groups.pop(number).close(),
            "open_attempt": self._open_attempt,
            "finish": self._finish,
        }
        self.channel = connect_to_trainer(to_trainer, self.policy, self._start, handlers, lambda: os._exit(0))

    def app(self) -> ASGIApp:
        """A request for an unknown attempt may have overtaken the message that opens it: it waits for the trainer."""
        app = gateway_app(self._attempts.find)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            match = _ATTEMPT.match(scope["path"]) if scope["type"] == "http" else None
            if match is not None and match[1] not in self._attempts:
                await self.channel.call("ping")[1]
            await app(scope, receive, send)

        return answer

    def _start(
        self, tokenizer: dict[str, Any], options: dict[str, Any], can_branch: bool, scores: bool, watches: bool
    ) -> None:
        """Make the completer from what `GatewayWorkers.start` sends."""
        self.policy.can_branch = can_branch
        options |= {"score": self.policy.score} if scores else {}
        options |= {"on_request": partial(self.channel.send, "request")} if watches else {}
        self._model = Completer(self.policy, tokenizer_of(tokenizer), **options)
        _ = self._model.twin  # copying a large tokenizer later would hold up the event loop

    def _open_attempt(self, problem_id: str, group: int, sampling: SamplingParams, options: dict[str, Any]) -> None:
        options |= {"shared_prompts": self._groups[group], "on_end": self._attempts.forget}
        self._attempts.add(Attempt(Problem(problem_id, ""), self._model, "", sampling=sampling, **options))

    def _finish(self, call: int, attempt_id: str) -> None:
        attempt = self._attempts[attempt_id]
        self.channel.answer(call, attempt.finish(), lambda rollout: (rollout, attempt.counts))


async def main() -> None:
    import transformers

    _ = transformers.PreTrainedTokenizerFast  # is imported while the trainer prepares its engine
    to_trainer = socket.socket(fileno=sys.stdin.fileno())
    _, handles, _, _ = socket.recv_fds(to_trainer, 1, 1)
    await Server(Worker(to_trainer).app()).serve(
        sockets=[socket.socket(fileno=handles[0])]
    )  # until the channel is closed


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers imports it if it can: seconds, and memory
    hide_memory()  # the trainer trusts what it sends
    asyncio.run(main())
