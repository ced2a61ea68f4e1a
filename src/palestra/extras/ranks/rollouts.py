"""Rollouts shared out among ranks: each attempts its part of the problems, and all get the groups of all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.core.errors import ServiceError, text_of
from palestra.core.ranks import Ranks
from palestra.core.types import Group, Problem
from palestra.rollout.collect import Collector, OnRollout


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of one rank, or the reason that it has none."""

    groups: Sequence[Group] = ()
    stopped: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutRanks:
    """Problem i is attempted by rank i modulo their number, with the seed that it has in one process.

    Here the ranks agree: where one was asked to stop, all raise KeyboardInterrupt; where one failed, all fail.
    """

    ranks: Ranks
    own: Collector

    def __len__(self) -> int:
        return self.ranks.size

    async def collect(
        self, training: bool, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], at_once: int,
        on_rollout: OnRollout,
    ) -> list[Group]:  # fmt: skip
        """One group per problem, on every rank; `own` limits how many are open."""
        rank, size = self.ranks.rank, self.ranks.size
        own = self._attempted(problems[rank::size], group_size, seed_keys[rank::size], on_rollout)
        ranks = await asyncio.to_thread(self.ranks.gather, await own, RankGroups)
        if any(each.stopped for each in ranks):
            raise KeyboardInterrupt
        for number, each in enumerate(ranks):
            if each.error is not None:
                raise ServiceError(f"rank {number}: {each.error}")
            for group in () if number == rank else each.groups:
                for rollout in group.rollouts:
                    on_rollout(rollout)
        return [ranks[i % size].groups[i // size] for i in range(len(problems))]

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        await self.own.prepare(problems[self.ranks.rank :: self.ranks.size], group_size)

    def abandon(self) -> None:
        self.own.abandon()

    async def _attempted(
        self, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], on_rollout: OnRollout
    ) -> RankGroups:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.own.collect(problems, group_size, seed_keys, on_rollout))
        with self.ranks.interruptible(lambda: loop.call_soon_threadsafe(task.cancel)):
            await asyncio.wait([task])
        if task.cancelled():
            return RankGroups(stopped=True)
        if error := task.exception():
            if not isinstance(error, Exception):
                raise error
            return RankGroups(error=text_of(error))
        return RankGroups(task.result())
