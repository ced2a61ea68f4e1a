"""The pool of rollout actors: they die and join, and every group comes exactly once."""

import asyncio
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra.core.codec import CodecError
from palestra.core.errors import PalestraError, ResourceError, ServiceError, UnsupportedError
from palestra.core.types import Group, Problem, Rollout, Turn
from palestra.core.weights import Weights
from palestra.extras.ray import pool as pool_module
from palestra.extras.ray.pool import (
    MAX_LOSSES,
    GroupSampler,
    RolloutPool,
    pack,
    unpack,
)
from palestra.rollout.collect import RemoteCollector

sys.path.insert(0, str(Path(__file__).parent))
from fake_cluster import FakeCluster

PROBLEMS = [Problem(str(i), "?") for i in range(6)]
KEYS = [f"0/{problem.id}" for problem in PROBLEMS]


class Policy:
    version = 0

    def update(self, weights: Weights) -> None:
        weights.tensors()
        self.version = weights.version


class SlowCollector:
    """A group of one token that says its key, after `pace` is set; `fails` raises for the run."""

    def __init__(self, policy: Policy, pace: asyncio.Event) -> None:
        self.policy, self.pace = policy, pace
        self.fails: Exception | None = None

    async def collect(self, problems: Any, group_size: int, keys: Any, on_rollout: Any = None) -> list[Group]:
        await self.pace.wait()
        if self.fails:
            raise self.fails
        [problem], [key] = problems, keys
        turn = Turn("model", [int(key.split("/")[1])], [-0.5], self.policy.version)  # type: ignore[arg-type]
        return [Group(problem.id, (Rollout(problem.id, (turn,), (), "answered"),) * group_size)]

    def groups_at_once(self, group_size: int) -> int:
        return 8


class Room:
    """A pool with its collector; `pace` lets the actors finish."""

    def __init__(self, runner: asyncio.Runner, room: int = 2, size: int = 2, **options: Any) -> None:
        self.runner, self.pace, self.cluster = runner, asyncio.Event(), FakeCluster(room)
        self.fails: Exception | None = None
        self.pool = RolloutPool(self.cluster, size, needs="1 CPU", **options)
        self.pool.recipe = self.recipe
        self.pool.update(Weights(1, dict))

    def recipe(self) -> GroupSampler:
        policy: Any = Policy()
        collector = SlowCollector(policy, self.pace)
        collector.fails = self.fails
        return GroupSampler(policy, {True: collector, False: collector})

    @property
    def collector(self) -> RemoteCollector:
        return RemoteCollector(self.pool, True, lambda group_size: 4)

    def collect(self) -> Any:
        seen: list[Rollout] = []
        return self.collector.collect(PROBLEMS, 2, KEYS, seen.append)

    def versions(self, groups: list[Group]) -> set[int]:
        return {int(turn.versions[0]) for g in groups for r in g.rollouts for turn in r.turns}

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)

    def collect_with(self, *steps: tuple[Any, Any]) -> list[Group]:
        """Collect; each action is done as soon as its condition holds."""

        async def scenario() -> list[Group]:
            work = asyncio.create_task(self.collect())
            for condition, act in steps:
                await self.until(condition)
                act()
            return await work

        return self.runner.run(scenario())

    def is_busy(self) -> bool:
        return self.pool.actors == 2 and all(member.groups == 3 for member in self.pool._members)

    def lose_head(self) -> None:
        self.cluster.lost = "the head does not answer"


def seconds_later(seconds: float) -> Any:
    """A condition that holds from then on."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    for name, seconds in {"CHECK_S": 0.01, "RELAUNCH_S": 0.01, "GATHER_S": 0.05}.items():
        monkeypatch.setattr(pool_module, name, seconds)
    with asyncio.Runner() as made:
        yield made


def tokens(groups: list[Group]) -> list[int]:
    return [int(g.rollouts[0].turns[0].token_ids[0]) for g in groups]


def test_groups_come_in_the_order_of_their_problems_evenly_from_actors_that_a_closed_pool_ends(
    runner: asyncio.Runner,
) -> None:
    room = Room(runner)
    room.pace.set()
    assert tokens(runner.run(room.collect())) == [0, 1, 2, 3, 4, 5]
    assert sorted(len(actor.sampled) for actor in room.cluster.launched) == [3, 3]
    room.pool.release()
    assert room.cluster.closed
    assert all(actor.ended for actor in room.cluster.launched)


def test_every_group_comes_once_though_an_actor_is_killed_with_three_of_them(runner: asyncio.Runner) -> None:
    room = Room(runner)
    kill = (room.is_busy, lambda: room.cluster.launched[0].kill())
    groups = room.collect_with(kill, (lambda: room.pool.lost_groups == 3, room.pace.set))
    assert tokens(groups) == [0, 1, 2, 3, 4, 5]
    assert Counter(key for actor in room.cluster.launched for key in actor.sampled) == dict.fromkeys(KEYS, 1)
    assert room.cluster.launched[0].ended
    runner.run(room.until(lambda: room.pool.actors == 2))  # its place is filled again


def test_an_actor_that_finds_room_later_joins_with_the_newest_weights(runner: asyncio.Runner) -> None:
    room = Room(runner, room=1)
    room.pace.set()
    runner.run(room.collect())
    assert room.pool.actors == 1
    room.pool.update(Weights(2, dict))
    room.cluster.room = 2
    runner.run(room.until(lambda: room.pool.actors == 2))
    groups = runner.run(room.collect())
    assert room.versions(groups) == {2}
    assert all(actor.sampled for actor in room.cluster.launched)


def test_weights_that_come_while_an_actor_is_built_reach_it_before_its_first_group(runner: asyncio.Runner) -> None:
    room = Room(runner, room=0)
    room.pace.set()

    def update() -> None:
        room.pool.update(Weights(7, dict))  # no actor has joined yet
        room.cluster.room = 2

    assert room.versions(room.collect_with((lambda: room.cluster.launched, update))) == {7}


def test_an_actor_that_does_not_take_new_weights_is_replaced(runner: asyncio.Runner) -> None:
    room = Room(runner)
    room.pace.set()
    runner.run(room.collect())
    stuck = room.cluster.launched[0]
    room.cluster.refuses_weights = lambda actor: actor is stuck
    room.pool.update(Weights(2, dict))
    assert room.versions(runner.run(room.collect())) == {2}
    runner.run(room.until(lambda: stuck.ended))


def test_a_group_that_takes_one_actor_after_the_other_with_it_ends_the_run(runner: asyncio.Runner) -> None:
    room = Room(runner, size=1, room=1)

    async def scenario() -> None:
        work = asyncio.create_task(room.collector.collect(PROBLEMS[:1], 2, KEYS[:1]))
        for losses in range(MAX_LOSSES):
            await room.until(lambda: any(m.groups for m in room.pool._members))
            room.pool._members[0].actor.kill()  # type: ignore[attr-defined]
            await room.until(lambda losses=losses: room.pool.lost_groups == losses + 1)
        await work

    with pytest.raises(ServiceError, match=r"5 rollout actors died .* with the group of problem 0: it was killed"):
        runner.run(scenario())


def test_a_cluster_without_room_is_an_error_with_what_it_has_within_the_time_out(runner: asyncio.Runner) -> None:
    room = Room(runner, room=0, timeout_s=0.05)
    with pytest.raises(ResourceError, match=r"no rollout actor could start for 0\.05 s .*1 CPU.* has room for 0"):
        runner.run(room.collect())


def test_a_model_that_takes_long_to_load_is_no_lack_of_room(runner: asyncio.Runner) -> None:
    room = Room(runner, timeout_s=0.05)
    room.pace.set()
    room.cluster.loading.clear()
    assert tokens(room.collect_with((seconds_later(0.15), room.cluster.loading.set))) == [0, 1, 2, 3, 4, 5]


def test_a_lost_head_ends_what_is_under_way_with_the_reason(runner: asyncio.Runner) -> None:
    room = Room(runner)
    with pytest.raises(ServiceError, match=r"the head does not answer\. Start a cluster again, and resume the run"):
        room.collect_with((lambda: room.pool.actors == 2, room.lose_head))
    with pytest.raises(ServiceError, match="the head does not answer"):
        runner.run(room.collect())


def test_a_head_that_dies_with_one_of_its_actors_is_not_asked_what_it_has(runner: asyncio.Runner) -> None:
    room = Room(runner)

    def die() -> None:
        room.cluster.dying = True
        room.cluster.launched[0].kill()

    gone: list[Any] = []  # longer than the others are waited for
    one_left = (lambda: room.pool.actors == 1, lambda: gone.append(seconds_later(0.15)))
    with pytest.raises(ServiceError, match="the head does not answer"):
        room.collect_with((room.is_busy, die), one_left, (lambda: gone[0](), room.lose_head))
    assert not room.cluster.asked_while_dying


def test_a_failure_of_the_run_in_an_actor_is_that_of_the_run(runner: asyncio.Runner) -> None:
    room = Room(runner)
    room.fails = PalestraError("the reward function gave no number")
    room.pace.set()
    with pytest.raises(ServiceError, match="the reward function gave no number"):
        runner.run(room.collect())


def test_a_problem_that_cannot_be_sent_ends_the_run_with_the_name_of_its_part(runner: asyncio.Runner) -> None:
    problem = Problem("0", "?", row={"rows": [{"guard": threading.Lock()}]})
    with pytest.raises(CodecError, match=r"\.problem\.row\['rows'\]\[0\]\['guard'\] is a lock"):
        runner.run(Room(runner).collector.collect([problem], 2, ["0/0"]))


def test_an_actor_that_cannot_be_built_ends_the_run_instead_of_being_tried_for_ever(runner: asyncio.Runner) -> None:
    room = Room(runner)

    def recipe() -> GroupSampler:
        raise ModuleNotFoundError("No module named 'shop'")

    room.pool.recipe = recipe
    with pytest.raises(ServiceError, match=r"a rollout actor cannot be built: ModuleNotFoundError: .*'shop'"):
        runner.run(room.collect())


def test_an_actor_has_no_more_groups_than_it_may_have_open(runner: asyncio.Runner) -> None:
    room, most = Room(runner, size=1, room=1), list[int]()

    def full() -> bool:
        most.append(max((member.groups for member in room.pool._members), default=0))
        return most.count(4) > 30  # for a while

    assert tokens(room.collect_with((full, room.pace.set))) == [0, 1, 2, 3, 4, 5]
    assert max(most) == 4
    assert room.collector.groups_at_once(2) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_arrive_to_the_bit(dtype: torch.dtype) -> None:
    tensors = {"a.weight": torch.randn(3, 5).to(dtype), "scalar": torch.tensor(2.5, dtype=dtype)}
    arrived = unpack(pack(Weights(4, lambda: tensors)))
    assert arrived.version == 4
    for name, tensor in arrived.tensors().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, tensors[name])


def test_a_server_is_given_the_weights_once_and_the_actors_its_version(runner: asyncio.Runner) -> None:
    server: Any = Policy()
    room = Room(runner)
    room.pace.set()
    room.pool._server = server
    room.pool.update(Weights(3, dict))
    assert server.version == 3
    assert room.versions(runner.run(room.collect())) == {3}


def test_the_policy_of_a_pool_samples_no_turns(runner: asyncio.Runner) -> None:
    policy = Room(runner).pool
    with pytest.raises(UnsupportedError, match="whole groups"):
        runner.run(policy.sample(policy.open([1]), None))
