"""Runs one of our environments as a separate program: it samples from a trainer's model and posts scored groups.

register -> wait for the trainer -> [look for room -> attempt problems -> post] until the last step
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError
from palestra.envs.base import Environment
from palestra.extras.atropos.protocol import ApiUnreachable, WireClient, write_group
from palestra.rollout.collect import GroupCollector
from palestra.train.group_source import ProblemSource, gather
from palestra.train.watcher import Watcher

_POLL_S = 0.2
_RETRY_S = 1.0
_FAILURES_IN_A_ROW = 8  # groups without one whole attempt, after which going on is pointless


class TrainerStatus(NamedTuple):
    """The trainer's step, and the number of groups that it can still take from this environment."""

    step: int
    num_steps: int
    room_groups: int

    @property
    def is_over(self) -> bool:
        return self.step >= self.num_steps


@dataclass(slots=True)
class EnvironmentWorker:
    """The environment's side of the wire. `make_collector` is called once the trainer serves its model."""

    name: str
    environment: Environment
    make_collector: Callable[[], Awaitable[GroupCollector]]
    config: RunConfig
    wire: WireClient
    watcher: Watcher
    env_id: int = -1
    posted_groups: int = 0
    scores: list[float] = field(default_factory=list)  # of the posted rollouts
    _num_steps: int = 0
    _failures: int = 0
    _key: str = field(default_factory=lambda: uuid.uuid4().hex)

    async def run(self) -> None:
        """Feed the trainer until its last step, or until the trajectory API cannot be reached any more."""
        registration = {
            "max_token_length": self.config.rollout.max_new_tokens,
            "desired_name": self.name,
            "weight": 1.0,
            "group_size": self.config.rollout.group_size,
        }
        self.watcher.note(f"{self.name} registers at {self.wire.url}, and waits until a trainer has started")
        # before it was ever there, the API is waited for longer
        patient = replace(self.wire, gone_s=None)
        while (answer := await patient.call("/register-env", registration))["status"] != "success":
            await asyncio.sleep(_RETRY_S)
        self.env_id, self._num_steps = int(answer["env_id"]), int(answer["num_steps"])
        try:
            if (await self._trainer_status()).is_over:  # the API remembers a trainer that has ended
                self.watcher.note("the last training there is over; waiting for the next")
            while (await self._trainer_status()).is_over:
                await asyncio.sleep(_RETRY_S)
            # the first environment draws problems and seeds as the trainer's own process would, the next ones others
            source = ProblemSource(
                await self.make_collector(),
                self.environment.problems("train"),
                self.environment.reward_weights,
                self.config.rollout.group_size,
                self.config.seed + self.env_id,
                max_staleness=None,
                gives_back=False,  # several groups are in flight
            )
            await self._post_groups(source)
            self.watcher.note("the trainer has all the groups that it asked for")
        except ApiUnreachable as gone:
            self.watcher.note(f"the trajectory API is gone: {gone}")
        finally:
            with contextlib.suppress(PalestraError):
                await replace(self.wire, give_up_s=0, gone_s=None).call("/disconnect-env", {"env_id": self.env_id})

    async def _trainer_status(self) -> TrainerStatus:
        status = await self.wire.call("/status-env", {"env_id": self.env_id}, method="GET")
        batch_size = int((await self.wire.call("/info"))["batch_size"])
        size = self.config.rollout.group_size
        if batch_size % size:
            raise SettingError(
                f"the trainer takes batches of {batch_size} sequences, which groups of {size} do not fill exactly; "
                "give both sides the same --rollout.group_size"
            )
        # one batch besides the one being trained: more would wait longer, and be sampled from older weights
        room = batch_size // size - int(status["self_queue_size"])
        return TrainerStatus(int(status["current_step"]), int(status.get("num_steps", self._num_steps)), room)

    async def _post_groups(self, source: ProblemSource) -> None:
        running: set[asyncio.Task[None]] = set()
        noted_step = -1
        try:
            while not (status := await self._trainer_status()).is_over:
                if status.step != noted_step:
                    noted_step, recent = status.step, self.scores[-64:]
                    mean = f", recent mean score {sum(recent) / len(recent):.2f}" if recent else ""
                    steps = f"step {status.step}/{status.num_steps}"
                    self.watcher.note(f"{steps}: {self.posted_groups} groups posted{mean}")
                most = max(1, self.config.rollout.max_open_episodes // self.config.rollout.group_size)
                for _ in range(min(status.room_groups, most) - len(running)):
                    running.add(asyncio.create_task(self._one_group(source)))
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

    async def _one_group(self, source: ProblemSource) -> None:
        """Attempt a problem and post its group, unless every attempt failed. `train.refill_limit` bounds refills."""
        number = source.drawn
        try:
            groups = (await gather(source, 1, self.config, version=0)).groups
        except PalestraError as error:
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise
            self.watcher.note(str(error))
            await asyncio.sleep(_RETRY_S)
            return
        self._failures = 0
        # the last one has signal if any has, unless its problem is broken
        group = next(g for g in reversed(groups) if any(r.error is None for r in g.rollouts))
        body = write_group(group, self.env_id, self.config.train.mask_truncated)
        await self.wire.call("/scored_data", body, key=f"{self._key}/{number}")
        self.posted_groups += 1
        self.scores += group.rewards
