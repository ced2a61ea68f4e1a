"""One of our environments as a program of its own: it samples from a trainer's model and posts scored groups.

register -> wait for the trainer -> [ask for room -> attempt problems -> post] until the last step
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Problem
from palestra.rollout.collect import Collector
from palestra.train.loop import Watcher, draw
from palestra.train.samples import has_signal
from palestra.wire.client import WireClient, WireGone
from palestra.wire.groups import write_group

_POLL_S = 0.2
_RETRY_S = 1.0
_FAILURES_IN_A_ROW = 8  # groups without one whole attempt, after which going on is pointless


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the trainer is, and how many more groups of ours it has use for."""

    step: int
    num_steps: int
    room_groups: int

    @property
    def is_over(self) -> bool:
        return self.step >= self.num_steps


@dataclass(slots=True)
class Feed:
    """An environment's side of the wire. `make_collector` is called once the trainer serves its model."""

    name: str
    problems: Sequence[Problem]
    make_collector: Callable[[], Awaitable[Collector]]
    config: RunConfig
    wire: WireClient
    watcher: Watcher
    env_id: int = -1
    posted_groups: int = 0
    scores: list[float] = field(default_factory=list)
    _num_steps: int = 0
    _failures: int = 0
    _drawn: Iterator[int] = field(default_factory=itertools.count)
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def run(self) -> None:
        """Feed the trainer to its last step. A trajectory API that goes away for good ends it, too."""
        await self._register()
        try:
            standing = await self._look()
            if standing.is_over:  # the API remembers a trainer that has ended
                self.watcher.note("the last training there is over; waiting for the next")
            while standing.is_over:
                await asyncio.sleep(_RETRY_S)
                standing = await self._look()
            await self._feed(await self.make_collector())
            self.watcher.note("the trainer has all the groups that it asked for")
        except WireGone as gone:
            self.watcher.note(f"the trajectory API went away: {gone}")
        finally:
            with contextlib.suppress(PalestraError):
                await replace(self.wire, give_up_s=0, gone_s=None).ask("/disconnect-env", {"env_id": self.env_id})

    async def _register(self) -> None:
        me = {
            "max_token_length": self.config.rollout.max_new_tokens,
            "desired_name": self.name,
            "weight": 1.0,
            "group_size": self.config.rollout.group_size,
        }
        self.watcher.note(f"{self.name} registers at {self.wire.url}, and waits until a trainer has started")
        # the API is waited for longer before it was ever there
        patient = replace(self.wire, gone_s=None)
        while (answer := await patient.ask("/register-env", me))["status"] != "success":
            await asyncio.sleep(_RETRY_S)
        self.env_id, self._num_steps = int(answer["env_id"]), int(answer["num_steps"])

    async def _look(self) -> Standing:
        status = await self.wire.ask("/status-env", {"env_id": self.env_id}, method="GET")
        batch_size = int((await self.wire.ask("/info"))["batch_size"])
        size = self.config.rollout.group_size
        if batch_size % size:
            raise PalestraError(
                f"the trainer takes batches of {batch_size} sequences, which groups of {size} do not fill exactly; "
                "give both sides the same --rollout.group_size"
            )
        # one batch beside the one being trained: what waits longer was sampled from older weights
        room = batch_size // size - int(status["self_queue_size"])
        return Standing(int(status["current_step"]), int(status.get("num_steps", self._num_steps)), room)

    async def _feed(self, collector: Collector) -> None:
        running: set[asyncio.Task[None]] = set()
        told = -1
        try:
            while not (standing := await self._look()).is_over:
                if standing.step != told:
                    told = standing.step
                    self._tell(standing)
                for _ in range(standing.room_groups - len(running)):
                    running.add(asyncio.create_task(self._one_group(collector)))
                if not running:
                    await asyncio.sleep(_POLL_S)
                    continue
                done, running = await asyncio.wait(running, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _tell(self, standing: Standing) -> None:
        recent = self.scores[-64:]
        mean = f", mean score of late {sum(recent) / len(recent):.2f}" if recent else ""
        self.watcher.note(f"step {standing.step}/{standing.num_steps}: {self.posted_groups} groups posted{mean}")

    async def _one_group(self, collector: Collector) -> None:
        """Attempt a problem and post the group, unless every attempt failed."""
        number, group = await self._group(collector)
        if group is None:
            await asyncio.sleep(_RETRY_S)
            return
        body = write_group(group, self.env_id, self.config.train.mask_truncated)
        await self.wire.ask("/scored_data", body, key=f"{self._key}/{number}")
        self.posted_groups += 1
        self.scores += group.rewards

    async def _group(self, collector: Collector) -> tuple[int, Group | None]:
        """A group with its number; where siblings are all equal, fresh problems are tried as in training."""
        train = self.config.train
        refills = train.refill_limit if train.filter_equal_groups else 0
        while True:
            number = next(self._drawn)
            group = await self._attempt(collector, number)
            if group is None or has_signal(group) or refills == 0:
                return number, group
            refills -= 1

    async def _attempt(self, collector: Collector, number: int) -> Group | None:
        """None where every attempt failed, which is told; many in a row end the program."""
        seed = self.config.seed + self.env_id  # several of one kind shall not attempt the same problems
        (problem,) = draw(self.problems, number, 1, seed)
        try:
            (group,) = await collector.collect([problem], self.config.rollout.group_size, f"feed/{seed}/{number}")
        except PalestraError as error:
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise
            self.watcher.note(f"{problem.id}: {error}")
            return None
        self._failures = 0
        return group
