"""A cluster of rollout actors in this process: what they do is real, only Ray is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from palestra.core.codec import decode
from palestra.extras.ray.pool import ActorLost, GroupJob, GroupSampler, PackedWeights, Recipe


class FakeActor:
    """Dies with `kill`: then all that it does raises ActorLost, and what was under way is lost."""

    def __init__(self, cluster: FakeCluster, recipe: Recipe) -> None:
        self.cluster, self.recipe = cluster, recipe
        self.sampler: GroupSampler | None = None
        self.sampled: list[str] = []
        self.died = asyncio.get_running_loop().create_future()
        self.is_placed = self.ended = False

    async def place(self) -> None:
        while self.cluster.placed() >= self.cluster.room:
            await asyncio.sleep(0.001)
        self.is_placed = True

    async def build(self) -> None:
        await self.cluster.loading.wait()
        self.sampler = self.cluster.build(self.recipe)

    async def update(self, shared: PackedWeights) -> None:
        assert self.sampler is not None
        self.sampler.update(shared)

    async def sample(self, job: bytes) -> bytes | str:
        assert self.sampler is not None
        work = asyncio.ensure_future(self.sampler.sample(job))
        await asyncio.wait({work, self.died}, return_when=asyncio.FIRST_COMPLETED)
        if self.died.done():
            work.cancel()
            raise ActorLost("it was killed")
        self.sampled.append(decode(job, GroupJob).seed_key)
        return await work

    def kill(self) -> None:
        self.died.set_result(None)
        self.sampler = None

    def end(self) -> None:
        self.ended = True


class FakeCluster:
    """`room` is how many actors find a place."""

    def __init__(self, room: int = 2, build: Callable[[Any], GroupSampler] = lambda recipe: recipe()) -> None:
        self.room, self.build = room, build
        self.launched: list[FakeActor] = []
        self.lost: str | None = None
        self.dying = False  # it does not answer any more, and is not given up yet
        self.asked_while_dying = False
        self.refuses_weights: Callable[[FakeActor], bool] = lambda actor: False
        self.closed = False
        self.loading = asyncio.Event()
        self.loading.set()

    def placed(self) -> int:
        return sum(actor.is_placed and not actor.ended for actor in self.launched)

    def launch(self, recipe: Recipe) -> FakeActor:
        self.launched.append(FakeActor(self, recipe))
        return self.launched[-1]

    def share(self, weights: PackedWeights) -> PackedWeights:
        return weights

    def update_all(self, actors: Sequence[Any], shared: PackedWeights, timeout_s: float) -> list[Any]:
        for actor in actors:
            if not self.refuses_weights(actor):
                actor.sampler.update(shared)
        return [actor for actor in actors if self.refuses_weights(actor)]

    async def answers(self) -> bool:
        return self.lost is None and not self.dying

    async def failure(self) -> str | None:
        return self.lost

    def resources(self) -> str:
        self.asked_while_dying |= self.dying
        return f"room for {self.room}"

    def close(self) -> None:
        self.closed = True
