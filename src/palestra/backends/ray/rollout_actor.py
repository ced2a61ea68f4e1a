"""The process of one rollout actor. Nothing heavy is imported before it has answered that it runs."""

from __future__ import annotations

from typing import Any

from ray import cloudpickle


class RolloutActor:
    """`GroupSampler`, which it builds from a recipe, does its work."""

    def __init__(self) -> None:
        self._sampler: Any = None

    async def place(self) -> None:
        """Answers as soon as the process runs."""

    async def build(self, recipe: bytes) -> None:
        self._sampler = cloudpickle.loads(recipe)()

    async def update(self, weights: Any) -> None:
        self._sampler.update(weights)

    async def sample(self, job: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = await self._sampler.sample(cloudpickle.loads(job))
        return answer
