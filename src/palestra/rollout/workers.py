"""Processes that run the agent loop (templates, tools, measures) for the policy of this process.

The interpreter runs one thread at a time. On a GPU a small model samples faster than one process can render prompts,
call tools and read turns, so several do: each group of attempts belongs to one worker, which asks for its turns over a
channel. Workers are forks of this process: what an environment loaded is there, and nothing is pickled to start them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from palestra.core.calls import hung_calls, note_hung_calls
from palestra.core.channel import Channel, Handlers, LogToChannel
from palestra.core.children import end_group, ends_with_parent
from palestra.core.codec import CodecError, exact_problem
from palestra.core.errors import ResourceError, SettingError
from palestra.core.machine import interpreter_for_many_rollouts
from palestra.core.types import Group, Problem
from palestra.policy.base import Policy
from palestra.policy.channel import ChannelPolicy, PolicyServer
from palestra.policy.local import LocalPolicy
from palestra.rollout.collect import Collector, GroupCollector, OnRollout

NUMBERS_OF_A_JOB = 1 << 50  # of sessions
END_S = 5.0

log = logging.getLogger("palestra")

MakeCollectors = Callable[[Policy[Any]], Mapping[bool, Collector]]  # for training (True) and for evaluations (False)
OnGroup = Callable[[int, Group], None]
Call = tuple["Worker", int, asyncio.Future[None]]


@dataclass(eq=False, slots=True)
class Worker:
    """A worker process, seen from the process that samples."""

    pid: int
    socket: socket.socket
    server: PolicyServer
    channel: Channel | None = None
    on_group: dict[int, OnGroup] = field(default_factory=dict)  # by the number of the call
    hung_calls: int = 0
    has_ended: bool = False  # its number may be another process's now


class RolloutWorkers:
    """Forked worker processes; they end with `close`, or with this process.

    `make` builds the collectors of a worker over the policy that asks this process.
    """

    def __init__(self, policy: LocalPolicy, make: MakeCollectors, count: int, seed: int) -> None:
        if sys.platform != "linux":
            raise SettingError("rollout.workers needs Linux, which can fork processes; set it to 0")
        self._policy = policy
        self._jobs = 0
        self._prepared: tuple[Sequence[Problem], int] = ((), 0)  # problems and group size
        self._workers: list[Worker] = []
        for place in range(count):
            self._workers.append(self._start(partial(_serve, make, place, count, seed)))
        self._end = weakref.finalize(self, _end_all, list(self._workers))

    def __len__(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """End the workers."""
        self._end()

    async def collect(
        self, training: bool, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], at_once: int,
        on_rollout: OnRollout,
    ) -> list[Group]:  # fmt: skip
        """One group per problem, up to `at_once` groups of each worker at a time.

        Which worker makes which group does not depend on their speed.
        """
        found: dict[int, Group] = {}

        def on_group(i: int, group: Group) -> None:
            found[i] = group
            for rollout in group.rollouts:
                on_rollout(rollout)
            self._policy.expect(-group_size)  # also where its episodes did not open

        (known, size), self._prepared = self._prepared, ((), 0)
        is_prepared = size == group_size and len(known) == len(problems)
        is_prepared = is_prepared and all(a is b for a, b in zip(known, problems, strict=True))
        job = self._new_job()
        calls: list[Call] = []
        try:
            for worker, numbers in self._shares(problems, seed_keys):
                own = None if is_prepared else [exact_problem(problems[i]) for i in numbers]
                keys = [seed_keys[i] for i in numbers]
                self._policy.expect(min(len(numbers), at_once) * group_size)
                call, future = self._channel(worker).call("collect", job, training, group_size, numbers, own, keys)
                worker.on_group[call] = on_group
                calls.append((worker, call, future))
            done, _ = await asyncio.wait([future for *_, future in calls], return_when=asyncio.FIRST_EXCEPTION)
            for future in done:
                future.result()
        except CodecError as error:
            raise CodecError(f"{error}; set rollout.workers to 0") from None
        finally:
            self._policy.expect(-len(problems) * group_size)  # those that did not begin will not
            await _cancel(calls)
        return [found[i] for i in range(len(problems))]

    def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Let the workers open the episodes and render the prompts of these groups now."""
        if len(problems) < len(self._workers):  # their keys, which are not known yet, decide who collects them
            return
        job = self._new_job()
        with contextlib.suppress(CodecError):  # `collect` says what cannot be sent
            for worker, numbers in self._shares(problems, ()):
                self._channel(worker).send("prepare", job, group_size, [exact_problem(problems[i]) for i in numbers])
            self._prepared = (list(problems), group_size)

    def abandon(self) -> None:
        self._prepared = (), 0
        for worker in self._workers:
            if worker.channel is not None:
                worker.channel.send("abandon")

    def _shares(self, problems: Sequence[Problem], seed_keys: Sequence[str]) -> Iterator[tuple[Worker, list[int]]]:
        """The numbers of each worker's problems."""
        count, size = len(problems), len(self._workers)
        first = zlib.crc32(seed_keys[0].encode()) % size if count < size else 0
        for place, worker in enumerate(self._workers):
            if numbers := list(range((place - first) % size, count, size)):
                yield worker, numbers

    def _new_job(self) -> tuple[int, int]:
        """The policy's version, and the first number of the sessions."""
        self._jobs += 1
        return self._policy.version, self._jobs * NUMBERS_OF_A_JOB

    def _start(self, serve: Callable[[socket.socket], None]) -> Worker:
        ours, theirs = socket.socketpair()
        end_with_parent = ends_with_parent(signal.SIGKILL)
        assert end_with_parent is not None
        with warnings.catch_warnings():
            # the workers use nothing that another thread may hold: no GPU, no tokenizer threads, no log handlers
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                end_with_parent()
                for sock in (ours, *(worker.socket for worker in self._workers)):
                    sock.close()
                serve(theirs)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        return Worker(pid, ours, PolicyServer(self._policy, numbered=True))

    def _channel(self, worker: Worker) -> Channel:
        """The channel of a worker, in the event loop that samples."""
        if worker.channel is None:
            handlers: Handlers = {
                **worker.server.handlers,
                "group": partial(self._add_group, worker),
                "log": lambda name, level, text: logging.getLogger(name).log(level, "%s", text),
            }
            worker.channel = Channel(worker.socket, handlers, partial(self._lost, worker))
            worker.server.channel = worker.channel
        return worker.channel

    def _add_group(self, worker: Worker, call: int, number: int, group: Group, hung: int) -> None:
        if hung != worker.hung_calls:
            note_hung_calls(hung - worker.hung_calls)
            worker.hung_calls = hung
        if (on_group := worker.on_group.get(call)) is not None:
            on_group(number, group)

    def _lost(self, worker: Worker) -> None:
        """A worker has ended: the groups that it has fail, and with them the step."""
        status = _wait(worker.pid, END_S)
        worker.has_ended = status is not None
        code = "" if status is None else f" (exit code {os.waitstatus_to_exitcode(status)})"
        worker.server.close()
        assert worker.channel is not None
        worker.channel.close(
            ResourceError(
                f"a rollout worker ended{code}; its last output may say why. If the environment does not work in "
                "several processes, set rollout.workers to 0, and resume the run"
            )
        )


@dataclass(frozen=True, slots=True)
class WorkerCollector(GroupCollector):
    """Groups made by workers, for training or for evaluations. `open_groups` is how many of a size may be open."""

    workers: RolloutWorkers
    training: bool
    open_groups: Callable[[int], int]

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
    ) -> list[Group]:
        at_once = self._at_once(group_size)
        return await self.workers.collect(self.training, problems, group_size, seed_keys, at_once, on_rollout)

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        self.workers.prepare(problems, group_size)

    def abandon(self) -> None:
        self.workers.abandon()

    def groups_at_once(self, group_size: int) -> int:
        return self._at_once(group_size) * len(self.workers)

    def _at_once(self, group_size: int) -> int:
        """Of each worker."""
        return max(1, self.open_groups(group_size) // len(self.workers))


class _Serving:
    """The work of one worker process."""

    def __init__(self, policy: ChannelPolicy, collectors: Mapping[bool, Collector]) -> None:
        self._policy = policy
        self._collectors = collectors
        self._prepared: list[Problem] = []
        self._preparing: asyncio.Task[None] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, sock: socket.socket) -> None:
        """Answer until the process that samples closes its end."""
        ended = asyncio.Event()
        handlers: Handlers = {
            "collect": self._collect,
            "prepare": self._prepare,
            "abandon": self._collectors[True].abandon,
            "cancel": self._cancel,
        }
        self._channel = self._policy.channel = Channel(sock, {**handlers, **self._policy.handlers}, ended.set)
        logging.getLogger().handlers = [LogToChannel(self._channel)]
        log.handlers, log.propagate = [], True
        with interpreter_for_many_rollouts():
            await ended.wait()

    def _prepare(self, job: tuple[int, int], group_size: int, problems: list[Problem]) -> None:
        self._policy.begin_job(*job)
        self._prepared = problems
        self._preparing = asyncio.create_task(self._collectors[True].prepare(problems, group_size))

    def _collect(
        self, call: int, job: tuple[int, int], training: bool, group_size: int, numbers: list[int],
        problems: list[Problem] | None, keys: list[str],
    ) -> None:  # fmt: skip
        collected = self._collected(call, job, training, group_size, numbers, problems, keys)
        self._tasks[call] = asyncio.create_task(collected)

    def _cancel(self, call: int) -> None:
        if (task := self._tasks.get(call)) is not None:
            task.cancel()

    async def _collected(
        self, call: int, job: tuple[int, int], training: bool, group_size: int, numbers: list[int],
        problems: list[Problem] | None, keys: list[str],
    ) -> None:  # fmt: skip
        """Send each group when it is complete. Without problems they are the prepared ones."""

        def on_group(i: int, group: Group) -> None:
            self._channel.send("group", call, numbers[i], group, hung_calls())

        try:
            if self._preparing is not None:
                await self._preparing
            self._policy.begin_job(*job)
            chosen, self._prepared = self._prepared if problems is None else problems, []
            await self._collectors[training].collect(chosen, group_size, keys, on_group=on_group)
            self._channel.reply(call, None)
        except BaseException as error:  # the process that samples waits for the answer
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                self._channel.reply(call, None)
            else:
                self._channel.fail(call, error)
        finally:
            del self._tasks[call]


def _serve(make: MakeCollectors, place: int, count: int, seed: int, sock: socket.socket) -> None:
    """Run a worker, in its own process."""
    os.setsid()  # Ctrl-C in a terminal is for the process that samples
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has none of the tokenizers' threads
    random.seed(f"{seed}/{place}")  # of tools that use it
    policy = ChannelPolicy(place, count)
    asyncio.run(_Serving(policy, make(policy)).run(sock))


async def _cancel(calls: Sequence[Call]) -> None:
    """End the calls that are not done, and wait until their sessions are closed."""
    pending = [future for *_, future in calls if not future.done()]
    for worker, call, future in calls:
        worker.on_group.pop(call, None)
        if not future.done() and worker.channel is not None:
            worker.channel.send("cancel", call)
    if pending:
        await asyncio.wait(pending, timeout=END_S)


def _wait(pid: int, seconds: float) -> int | None:
    """The status of a child that ends within the time; None for one that does not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    return None


def _end_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        if worker.channel is not None:
            worker.channel.close()
        else:
            worker.socket.close()
    for worker in workers:
        if not worker.has_ended and _wait(worker.pid, END_S) is None:
            end_group(worker.pid)
            os.waitpid(worker.pid, 0)
