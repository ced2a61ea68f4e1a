"""An elastic pool of rollout actors: each group goes to the actor with the least to do, and what a lost actor had is
sampled again by another.

The pool knows no Ray: `ray_cluster.py` starts actors there, and tests start them in this process. A group is
waited for by one coroutine, which takes one answer, so none is lost and none comes twice. Actors that die are replaced,
and those that find no room in the cluster join when it has grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from palestra.core.codec import decode, encode, exact_problem
from palestra.core.errors import ResourceError, ServiceError, UnsupportedError, text_of
from palestra.core.types import Group, Problem
from palestra.core.weights import Weights
from palestra.policy.base import Policy, TokenSessions
from palestra.rollout.collect import GroupCollector, OnRollout, RemoteCollector


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
    packed = {}
    for name, tensor in weights.tensors().items():
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        packed[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content
    return PackedWeights(weights.version, packed)


def unpack(packed: PackedWeights) -> Weights:
    def tensor(dtype: str, shape: tuple[int, ...], content: Any) -> torch.Tensor:
        # a copy: what the object store hands out is read-only, and not aligned for every dtype
        return torch.from_numpy(content.copy()).view(getattr(torch, dtype)).reshape(shape)

    tensors = packed.tensors or {}
    return Weights(packed.version, lambda: {name: tensor(*content) for name, content in tensors.items()})


@dataclass(slots=True)
class GroupSampler:
    """The sampler of one actor: its own policy, and our agent loop."""

    policy: Policy[Any]
    collectors: Mapping[bool, GroupCollector]  # for training (True) and for evaluations (False)

    def update(self, packed: PackedWeights) -> None:
        if packed.tensors is None:
            self.policy.version = packed.version  # type: ignore[misc]  # of a server that others update
            if packed.served_model is not None:
                self.policy.served_model = packed.served_model  # type: ignore[attr-defined]
        else:
            self.policy.update(unpack(packed))

    async def sample(self, content: bytes) -> bytes | str:
        """The group of a job, both encoded; the text of an error that fails the whole run, rather than an attempt."""
        try:
            job: GroupJob = decode(content, GroupJob)
            [group] = await self.collectors[job.training].collect([job.problem], job.group_size, [job.seed_key])
            return encode(group)
        except Exception as error:
            return text_of(error)


Recipe = Callable[[], GroupSampler]  # builds it in the actor's own process


log = logging.getLogger("palestra")
MAX_LOSSES = 5  # actors that one group may take with it before it, and not the cluster, is to blame
CHECK_S = 1.0
RELAUNCH_S = 1.0
GATHER_S = 10.0


class ActorLost(Exception):
    """An actor has died, or its node has; why is its text."""


# RayActor and RayCluster of ray_cluster.py, or those of a test. An actor's errors other than ActorLost end the run.
Actor = Any  # place, build, update, sample, end
Cluster = Any  # launch, share, update_all, answers, failure, resources, close


@dataclass(slots=True, eq=False)
class Member:
    """An actor that samples, and how many groups it has."""

    actor: Actor
    groups: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutPool(TokenSessions):
    """Up to `size` actors, by a recipe. It starts with the first group, in the event loop that samples.

    It is the policy of its run, and hands out weights: actors sample whole groups with their own. With `server`, a
    running vLLM for instance, that one is given the weights, and the actors its version alone.
    """

    samples_groups = True
    version: int = 0
    recipe: Recipe

    def __init__(
        self, cluster: Cluster, size: int, *, needs: str = "", timeout_s: float = 120.0,
        server: Policy[Any] | None = None, recipe_of: Callable[..., Recipe] | None = None,
    ) -> None:  # fmt: skip
        """`recipe_of` makes the recipe of a config and a task."""
        self.size = size
        self.lost_groups = 0
        self._server, self._recipe_of = server, recipe_of
        self._cluster = cluster
        self._needs = needs
        self._timeout_s = timeout_s
        self._shared: Any = None
        self._launched: list[Actor] = []
        self._members: list[Member] = []  # of them, those that sample
        self._building = 0  # placed, and not yet among them
        self._first_joined: float | None = None
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[list[Group]] | None = None  # never has a result

    def __len__(self) -> int:
        return self.size

    @property
    def actors(self) -> int:
        return len(self._members)

    def update(self, weights: Weights) -> None:
        """Broadcast the weights; groups in progress continue with them. Replace actors that do not take them."""
        if self._server is None:
            packed = pack(weights)
        else:
            self._server.update(weights)
            packed = PackedWeights(weights.version, None, getattr(self._server, "served_model", None))
        self._shared, self.version = self._cluster.share(packed), packed.version
        lost = self._cluster.update_all([m.actor for m in self._members], self._shared, self._timeout_s)
        for member in [m for m in self._members if m.actor in lost]:
            self._lose(member, "it did not take new weights")

    async def collect(
        self, training: bool, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], at_once: int,
        on_rollout: OnRollout,
    ) -> list[Group]:  # fmt: skip
        """One group per problem, unless the cluster is lost before they are there."""

        async def sampled(problem: Problem, key: str) -> Group:
            group = await self._sample(GroupJob(problem, group_size, key, training), at_once)
            for rollout in group.rollouts:
                on_rollout(rollout)
            return group

        failed = self._start()
        groups = asyncio.gather(*map(sampled, problems, seed_keys))
        # mark as retrieved, in case it is not awaited
        groups.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait({groups, failed}, return_when=asyncio.FIRST_COMPLETED)
            return groups.result() if groups.done() else failed.result()
        finally:
            groups.cancel()

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Actors open their episodes when they are asked for the groups."""

    def abandon(self) -> None: ...

    async def _sample(self, job: GroupJob, at_once: int) -> Group:
        """One group, by the actor with the least to do; an actor has at most `at_once` groups."""
        content = encode(replace(job, problem=exact_problem(job.problem)))
        for _ in range(MAX_LOSSES):
            member = await self._least_busy(at_once)
            member.groups += 1
            try:
                answer = await member.actor.sample(content)
                if isinstance(answer, str):
                    raise ServiceError(answer)
                group: Group = decode(answer, Group)
                return group
            except ActorLost as error:
                reason = str(error)
                self.lost_groups += 1
                self._lose(member, reason)
            finally:
                member.groups -= 1
                self._changed.set()
        raise ServiceError(
            f"{MAX_LOSSES} rollout actors died one after the other with the group of problem {job.problem.id}: "
            f"{reason}. If they run out of memory, give each more (ray.cpus_per_actor, ray.gpus_per_actor), or lower "
            "rollout.group_size or rollout.max_new_tokens"
        )

    async def _least_busy(self, at_once: int) -> Member:
        began = time.monotonic()
        while True:
            free = [m for m in self._members if m.groups < at_once]
            if free and self._has_gathered():
                return min(free, key=lambda member: member.groups)
            if self._members or self._building:
                began = time.monotonic()
            elif time.monotonic() - began > self._timeout_s:
                raise ResourceError(
                    f"no rollout actor could start for {self._timeout_s:g} s (ray.timeout_s): each needs "
                    f"{self._needs}, and the cluster has {self._cluster.resources()}. Add nodes, or ask for less: "
                    "ray.cpus_per_actor, ray.gpus_per_actor"
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), CHECK_S)

    def _has_gathered(self) -> bool:
        """Whether the pool is full, or the first actor has waited briefly, so that it does not take all groups."""
        assert self._first_joined is not None
        return self.actors >= self.size or time.monotonic() - self._first_joined > GATHER_S

    def _start(self) -> asyncio.Future[list[Group]]:
        if self._failed is None:
            self._failed = asyncio.get_running_loop().create_future()
            self._keepers = [asyncio.create_task(self._keep()) for _ in range(self.size)]
            self._keepers.append(asyncio.create_task(self._watch()))
        return self._failed

    async def _keep(self) -> None:
        """Keep one place in the pool filled."""
        while True:
            while not await self._cluster.answers():
                await asyncio.sleep(CHECK_S)
            actor = self._cluster.launch(self.recipe)
            self._launched.append(actor)
            try:
                await actor.place()
                self._building += 1
                try:
                    await actor.build()
                    version = None
                    while version != self.version:  # newer weights may come while it takes these
                        version, shared = self.version, self._shared
                        await actor.update(shared)
                finally:
                    self._building -= 1
                member = Member(actor)
                self._members.append(member)
                self._first_joined = self._first_joined or time.monotonic()
                self._changed.set()
                log.info("%d of %d rollout actors", self.actors, self.size)
                await member.gone.wait()
                await asyncio.sleep(RELAUNCH_S)  # its head may be dying, too, and a request to it would hang
            except ActorLost as error:
                log.warning("a rollout actor was lost before it could sample: %s", error)
                await asyncio.sleep(RELAUNCH_S)
            except Exception as error:  # the next one would fail in the same way
                self._fail(f"a rollout actor cannot be built: {text_of(error)}")
                return
            finally:
                self._launched.remove(actor)
                actor.end()

    async def _watch(self) -> None:
        is_announced = False
        while (failure := await self._cluster.failure()) is None:
            await asyncio.sleep(CHECK_S)
            is_short = self.actors and self.actors + self._building < self.size and self._has_gathered()
            if is_short and not is_announced and await self._cluster.answers():  # a dead head would not, for minutes
                is_announced = True
                log.warning(
                    "%d of %d rollout actors have found room; the others join when they do. The cluster has %s",
                    self.actors,
                    self.size,
                    self._cluster.resources(),
                )
        self._fail(f"{failure}. Start a cluster again, and resume the run")

    def _fail(self, reason: str) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(ServiceError(reason))
            self._failed.exception()  # mark as retrieved, in case no group is being sampled

    def _lose(self, member: Member, reason: str) -> None:
        """Out of the pool; its place is filled again."""
        if member in self._members:
            self._members.remove(member)
            member.gone.set()
            log.warning("a rollout actor was lost: %s; its groups are sampled again", reason)

    def group_collector(self, config: Any, task: Any, training: bool, groups_at_once: Any) -> RemoteCollector:
        assert self._recipe_of is not None
        self.recipe = self._recipe_of(config, task)
        return RemoteCollector(self, training, groups_at_once)

    def release(self) -> None:
        for task in self._keepers:
            task.cancel()
        for actor in self._launched:
            actor.end()
        self._cluster.close()
        if self._server is not None:
            self._server.release()

    async def sample(self, session: Any, params: Any) -> Any:
        raise UnsupportedError("this run samples whole groups with a pool of rollout actors, not turn by turn")
