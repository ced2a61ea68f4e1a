"""Rollouts shared out among ranks: each attempts its part of the problems, and all get the groups of all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from palestra.core.errors import ServiceError, text_of
from palestra.core.ranks import Ranks
from palestra.core.types import Group, Problem
from palestra.rollout.collect import GroupCollector, OnRollout


@dataclass(frozen=True, slots=True)
class RankGroups:
    """What one rank has to show: its groups, or why it has none."""

    groups: Sequence[Group] = ()
    stopped: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SharedCollector(GroupCollector):
    """Problem i is attempted by rank i modulo their number, with the seed that it has in one process.

    Here the ranks agree: where one was asked to stop, all raise KeyboardInterrupt; where one failed, all fail.
    """

    inner: GroupCollector
    ranks: Ranks

    async def collect(
        self,
        problems: Sequence[Problem],
        group_size: int,
        seed_keys: Sequence[str],
        on_rollout: OnRollout = lambda r: None,
    ) -> list[Group]:
        rank, size = self.ranks.rank, self.ranks.size
        own = await self._attempted(problems[rank::size], group_size, seed_keys[rank::size], on_rollout)
        found = await asyncio.to_thread(self.ranks.gather, own)
        if any(part.stopped for part in found):
            raise KeyboardInterrupt
        for number, part in enumerate(found):
            if part.error is not None:
                raise ServiceError(f"rank {number}: {part.error}")
        for group in (group for number, part in enumerate(found) if number != rank for group in part.groups):
            for rollout in group.rollouts:
                on_rollout(rollout)
        return [found[i % size].groups[i // size] for i in range(len(problems))]

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        await self.inner.prepare(problems[self.ranks.rank :: self.ranks.size], group_size)

    def abandon(self) -> None:
        self.inner.abandon()

    def groups_at_once(self, group_size: int) -> int:
        return self.inner.groups_at_once(group_size)

    async def _attempted(
        self, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], on_rollout: OnRollout
    ) -> RankGroups:
        if not problems:
            return RankGroups(stopped=self.ranks.stop_requested)
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.inner.collect(problems, group_size, seed_keys, on_rollout))

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        with self.ranks.interruptible(cancel):
            await asyncio.wait([task])
        if task.cancelled():
            return RankGroups(stopped=True)
        if error := task.exception():
            if not isinstance(error, Exception):
                raise error
            text = text_of(error)
            return RankGroups(error=text)
        return RankGroups(task.result())
