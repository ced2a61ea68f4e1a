"""What a rollout actor does, wherever it runs: it samples whole groups of the problems that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from palestra.core.errors import PalestraError, text_of
from palestra.core.group_codec import group_from_record, group_to_record
from palestra.core.types import Group, Problem
from palestra.core.weights import Weights
from palestra.policy.base import Policy
from palestra.rollout.evaluate import CollectsGroups


@dataclass(frozen=True, slots=True)
class GroupJob:
    """One group to sample. The seed key fixes its rollouts, whichever actor makes them."""

    problem: Problem
    group_size: int
    seed_key: str
    training: bool  # else it is for an evaluation


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights as bytes, which the object store hands out without copying. `tensors` is None where the actors
    sample from a server that has the weights already."""

    version: int
    tensors: Mapping[str, tuple[str, tuple[int, ...], Any]] | None  # name -> dtype, shape, bytes
    served_model: str | None = None  # what the server calls them, where that changes with every version


def pack(weights: Weights) -> PackedWeights:
    def as_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], Any]:
        values = tensor.detach().cpu().contiguous()
        content = values.reshape(-1).view(torch.uint8).numpy()
        return str(values.dtype).removeprefix("torch."), tuple(values.shape), content

    return PackedWeights(weights.version, {name: as_bytes(tensor) for name, tensor in weights.tensors().items()})


def unpack(packed: PackedWeights) -> Weights:
    """
    >>> weights = Weights(3, lambda: {"w": torch.ones(2, 1, dtype=torch.bfloat16)})
    >>> unpack(pack(weights)).tensors()["w"].tolist()
    [[1.0], [1.0]]
    """

    def tensor(dtype: str, shape: tuple[int, ...], content: Any) -> torch.Tensor:
        # a copy: what the object store hands out is read-only, and not aligned for every dtype
        return torch.from_numpy(content.copy()).view(getattr(torch, dtype)).reshape(shape)

    tensors = packed.tensors or {}
    return Weights(packed.version, lambda: {name: tensor(*packed_tensor) for name, packed_tensor in tensors.items()})


@dataclass(slots=True)
class GroupSampler:
    """The sampler of one actor: a policy of its own, and our agent loop around it."""

    policy: Policy[Any]
    training: CollectsGroups
    evaluation: CollectsGroups

    def update(self, packed: PackedWeights) -> None:
        if packed.tensors is None:
            self.policy.version = packed.version  # type: ignore[misc]  # of a server that others update
            if packed.served_model is not None:
                self.policy.served_model = packed.served_model  # type: ignore[attr-defined]
        else:
            self.policy.update(unpack(packed))

    async def sample(self, job: GroupJob) -> dict[str, Any]:
        """The group as JSON data; what fails the whole run, rather than an attempt, is an `error` in it."""
        collector = self.training if job.training else self.evaluation
        try:
            [group] = await collector.collect([job.problem], job.group_size, [job.seed_key])
        except Exception as error:
            return {"error": text_of(error)}
        return group_to_record(group)


Recipe = Callable[[], GroupSampler]  # builds it in the actor's own process


def read_group(answer: Mapping[str, Any]) -> Group:
    if "error" in answer:
        raise PalestraError(answer["error"])
    return group_from_record(answer)
