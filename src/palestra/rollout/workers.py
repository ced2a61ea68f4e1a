"""Processes that run the agent loop (templates, tools, measures) for the policy of this process.

The interpreter runs one thread at a time. On a GPU a small model samples faster than one process can render prompts,
call tools and read turns, so several do: each group of attempts belongs to one worker, which asks for its turns over a
channel. Workers are forks of this process: what an environment loaded is there, and nothing is pickled to start them.
They are forked before the model is loaded, since CUDA and the threads of tokenizers do not survive a fork; the settings
and the tokenizer come over the channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from palestra.core.calls import hung_calls, note_hung_calls
from palestra.core.channel import Channel, Handlers
from palestra.core.children import Fork
from palestra.core.codec import CodecError, encode, exact_problem
from palestra.core.errors import PalestraError, ResourceError
from palestra.core.types import Group, Problem, Rollout
from palestra.policy.channel import ChannelPolicy, PolicyServer
from palestra.policy.local import LocalPolicy
from palestra.policy.workers import WorkerProcess, connect_to_trainer
from palestra.rollout.collect import Collector, OnRollout

NUMBERS_OF_A_JOB = 1 << 50  # of sessions
END_S = 5.0

log = logging.getLogger("palestra")

MakeCollectors = Callable[..., Mapping[bool, Collector]]  # for training (True) and for evaluations (False)
Job = tuple[int, int]  # the policy's version, and the first number of the sessions


class RolloutWorker(WorkerProcess):
    """A worker, seen from the process that samples."""

    hung_calls = 0

    def explain(self, how: str) -> PalestraError:
        self.note_hung_calls(0)
        log.warning("a rollout worker (process %d) %s; the others collect its groups", self.process.pid, how)
        return ResourceError(
            f"a rollout worker {how}; its last output may say why. If the environment does not work in several "
            "processes, set rollout.workers to 0, and resume the run"
        )

    def note_hung_calls(self, count: int) -> None:
        note_hung_calls(count - self.hung_calls)
        self.hung_calls = count


class RolloutWorkers:
    """Forked worker processes. They wait for `start`, and end with `close`, or with this process.

    `make` builds the collectors of a worker, in its process, over the policy that asks this process and with the values
    of `start`.
    """

    _policy: LocalPolicy
    _start: tuple[Any, ...]

    def __init__(self, make: MakeCollectors, count: int, seed: int) -> None:
        self._jobs = 0
        self._on_group: dict[int, Callable[[int, Group], None]] = {}  # by the first number of the job
        self._workers: list[RolloutWorker] = []
        for place in range(count):
            ours, theirs = socket.socketpair()
            others = [ours, *(worker.socket for worker in self._workers)]
            self._workers.append(RolloutWorker(Fork(partial(_serve, make, place, count, seed, theirs, others)), ours))
            theirs.close()
        self._end = weakref.finalize(self, _end_all, self._workers)

    def start(self, policy: LocalPolicy, *values: Any) -> None:
        """Let the workers collect with this policy, and with what `make` needs besides."""
        self._policy, self._start = policy, values

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers."""
        self._end()

    async def collect(
        self, training: bool, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], at_once: int,
        on_rollout: OnRollout,
    ) -> list[Group]:  # fmt: skip
        """One group per problem, up to `at_once` groups of each worker at a time.

        Which worker makes which group does not depend on their speed. What a worker had that has ended is collected
        again by the others, with the same keys.
        """
        found: dict[int, Group] = {}

        def on_group(i: int, group: Group) -> None:
            found[i] = group
            for rollout in group.rollouts:
                on_rollout(rollout)
            self._policy.expect(-group_size)  # also where its episodes did not open

        async def share(worker: RolloutWorker, numbers: list[int]) -> None:
            own, keys = [exact_problem(problems[i]) for i in numbers], [seed_keys[i] for i in numbers]
            self._policy.expect(min(len(numbers), at_once) * group_size)
            call, reply = self._channel(worker).call("collect", job, training, group_size, numbers, own, keys)
            reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())  # it may not be looked at
            try:
                await asyncio.wait([reply])
                reply.result()
                if unread := [problems[i].id for i in numbers if i not in found]:  # it would be collected for ever
                    raise CodecError(f"the groups of {unread} could not be read, as the log says")
            except PalestraError as error:
                if error is not worker.lost:
                    raise
                self._policy.expect(-len(numbers) * group_size)
            finally:
                if not reply.done():  # wait until its sessions are closed
                    self._channel(worker).cancel(call)
                    await asyncio.wait([reply], timeout=END_S)

        while missing := [i for i in range(len(problems)) if i not in found]:
            job = self._new_job()
            self._on_group[job[1]] = on_group
            shares = self._shares(missing, seed_keys[missing[0]])
            tasks = [asyncio.create_task(share(worker, numbers)) for worker, numbers in shares]
            try:
                await asyncio.gather(*tasks)
            except CodecError as error:
                raise CodecError(f"{error}; set rollout.workers to 0") from None
            finally:
                self._policy.expect(-len(missing) * group_size)  # those that did not begin will not
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                del self._on_group[job[1]]
        return [found[i] for i in range(len(problems))]

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Let the workers open the episodes and render the prompts of these groups now."""
        if len(problems) < len(self._running()):  # their keys, which are not known yet, decide who collects them
            return
        job = self._new_job()
        with contextlib.suppress(CodecError):  # `collect` says what cannot be sent
            for worker, numbers in self._shares(range(len(problems))):
                self._channel(worker).send("prepare", job, group_size, [exact_problem(problems[i]) for i in numbers])

    def abandon(self) -> None:
        for worker in self._workers:
            if worker.channel is not None:
                worker.channel.send("abandon")

    def _running(self) -> list[RolloutWorker]:
        """The workers that have not ended; the reason of the last one if all have."""
        running = [worker for worker in self._workers if worker.lost is None]
        if not running and (lost := self._workers[-1].lost) is not None:
            raise lost
        return running

    def _shares(self, numbers: Sequence[int], first_key: str = "") -> list[tuple[RolloutWorker, list[int]]]:
        """The workers with the numbers of their problems, if they have any."""
        running = self._running()
        size = len(running)
        first = zlib.crc32(first_key.encode()) % size if len(numbers) < size else 0
        shares = [(worker, list(numbers[(place - first) % size :: size])) for place, worker in enumerate(running)]
        return [(worker, own) for worker, own in shares if own]

    def _new_job(self) -> Job:
        self._jobs += 1
        return self._policy.version, self._jobs * NUMBERS_OF_A_JOB

    def _channel(self, worker: RolloutWorker) -> Channel:
        """The channel of a worker, in the event loop that samples."""
        if worker.channel is None:
            server = PolicyServer(self._policy, numbered=True)
            return worker.connect(server, {"group": partial(self._add_group, worker)}, *self._start)
        return worker.channel

    def _add_group(self, worker: RolloutWorker, job: int, number: int, group: Group, hung: int) -> None:
        worker.note_hung_calls(hung)
        if (on_group := self._on_group.get(job)) is not None:
            on_group(number, group)


class _Serving:
    """The work of one worker process."""

    _preparing: asyncio.Task[None] | None = None

    def __init__(self, make: MakeCollectors, policy: ChannelPolicy) -> None:
        self._make = make
        self._policy = policy
        self.handlers: Handlers = {"collect": self._collect, "prepare": self._prepare, "abandon": self._abandon}

    def start(self, *values: Any) -> None:
        self._collectors = self._make(self._policy, *values)

    def _abandon(self) -> None:
        self._collectors[True].abandon()

    def _prepare(self, job: Job, group_size: int, problems: list[Problem]) -> None:
        self._policy.begin_job(*job)
        self._preparing = asyncio.create_task(self._collectors[True].prepare(problems, group_size))

    def _collect(
        self, call: int, job: Job, training: bool, group_size: int, numbers: list[int],
        problems: list[Problem], keys: list[str],
    ) -> None:  # fmt: skip
        """Send each group when it is complete."""

        def on_group(i: int, group: Group) -> None:
            try:
                self._policy.channel.send("group", job[1], numbers[i], group, hung_calls())
            except CodecError:
                sendable = replace(group, rollouts=tuple(map(_sendable, group.rollouts)))
                self._policy.channel.send("group", job[1], numbers[i], sendable, hung_calls())

        async def collected() -> None:
            if self._preparing is not None:
                await self._preparing
            self._policy.begin_job(*job)
            await self._collectors[training].collect(problems, group_size, keys, on_group=on_group)

        self._policy.channel.answer(call, collected())


def _sendable(rollout: Rollout) -> Rollout:
    """The rollout, or one that failed because a part of it cannot be sent."""
    try:
        encode(rollout)
    except CodecError as error:
        return Rollout(rollout.problem_id, (), (), "failed", error=f"rollout{error}; set rollout.workers to 0")
    return rollout


def _serve(
    make: MakeCollectors, place: int, count: int, seed: int, sock: socket.socket, others: Sequence[socket.socket]
) -> None:
    """Run a worker, in its own process, until the one that samples closes its end."""
    for other in others:
        other.close()
    os.register_at_fork(after_in_child=sock.close)  # a process that a tool has forked may outlive this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers share the processors
    random.seed(f"{seed}/{place}")  # of tools that use it

    async def serve() -> None:
        ended, policy = asyncio.Event(), ChannelPolicy(place, count)
        serving = _Serving(make, policy)
        connect_to_trainer(sock, policy, serving.start, serving.handlers, ended.set)
        await ended.wait()

    asyncio.run(serve())


def _end_all(workers: Sequence[RolloutWorker]) -> None:
    for worker in workers:
        worker.disconnect()
    for worker in workers:
        worker.end(END_S)
