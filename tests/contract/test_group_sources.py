"""What every source of groups promises: our agent loop, a user's rollout_func, the trajectory wire, a queue, and a pool
of rollout actors (in this process; tests/cluster has them on a real cluster).

A new source is one more function in `KINDS`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import served

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group
from palestra.core.weights import Weights
from palestra.envs.discover import load_env
from palestra.extras.atropos.protocol import WireClient
from palestra.extras.atropos.server import trajectory_app
from palestra.extras.atropos.task import Address, WireSource, WireTask
from palestra.extras.ray.backend import ActorRecipe
from palestra.extras.ray.pool import RolloutPool
from palestra.models.loading import LoadedModel, load_model
from palestra.policy.local import LocalPolicy
from palestra.train.group_queue import GroupQueue
from palestra.train.group_source import GroupSource, gather
from palestra.train.tasks import EnvironmentTask, Parts
from palestra.train.watcher import Watcher

sys.path.insert(0, str(Path(__file__).parents[1] / "extras" / "ray"))
from fake_cluster import FakeCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_first_env.py"
CONFIG = RunConfig.build(
    {
        "seed": 3,
        "train": {"problems_per_step": 2, "max_steps": 9, "filter_equal_groups": False},
        "rollout": {"group_size": 2, "max_new_tokens": 24, "temperature": 1.0},
        "checkpoint": {"every": 1},
    }
)


class Notes(Watcher):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Kind:
    """A kind of source: `make` gives one that begins anew, as a program that was started again has it."""

    make: Callable[[], Any]
    runner: asyncio.Runner
    watcher: Notes
    api: httpx.Client | None = None

    def next(self, source: GroupSource, count: int = 2) -> list[Group]:
        return self.runner.run(asyncio.wait_for(source.next(count, version=0), 60))


@dataclass
class Room:
    """Where sources live: one model, one event loop."""

    loaded: LoadedModel
    runner: asyncio.Runner
    folder: Path
    watcher: Notes = field(default_factory=Notes)

    def parts(self) -> Parts:
        policy = LocalPolicy(self.loaded.model, self.loaded.tokenizer, kv_memory_gib=0.05, self_check=False)
        return Parts(CONFIG, policy, self.loaded.tokenizer, self.runner, self.watcher)


@contextmanager
def agent_loop(room: Room) -> Iterator[Kind]:
    env = load_env(str(EXAMPLE), {})
    yield Kind(lambda: EnvironmentTask(env).source(room.parts()), room.runner, room.watcher)


@contextmanager
def rollout_func(room: Room) -> Iterator[Kind]:
    """A function without a memory: what it answers depends on the prompt and the sibling alone."""
    env, tokenizer = load_env(str(EXAMPLE), {}), room.loaded.tokenizer

    def answer(prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, list[Any]]:
        ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"] for p in prompts]
        texts = [f"{len(p[-1]['content'])} or {i % 2}" for i, p in enumerate(prompts)]
        completions = [tokenizer(text).input_ids for text in texts]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[-0.1 * (i + 1) for i in range(len(row))] for row in completions],
        }

    yield Kind(lambda: EnvironmentTask(env, rollout_func=answer).source(room.parts()), room.runner, room.watcher)


@contextmanager
def wire(room: Room) -> Iterator[Kind]:
    """A trajectory API on loopback, to which a client has posted groups in columns of its own."""
    with served(trajectory_app(room.folder / "api")) as url, httpx.Client(base_url=url, timeout=30) as api:
        for number in range(10):
            post(api, columns(number))
        folder = RunFolder.create(room.folder, "wire", CONFIG, {})

        def make() -> WireSource:
            task = WireTask(WireClient(url), Address(port=0), room.loaded, folder)
            return task.source(room.parts())

        yield Kind(make, room.runner, room.watcher, api)


@contextmanager
def queue(room: Room) -> Iterator[Kind]:
    """Sampling two steps ahead, around the first."""
    with agent_loop(room) as inner:
        yield Kind(lambda: GroupQueue(inner.make(), per_step=2, max_staleness=2), room.runner, room.watcher)


@contextmanager
def actors(room: Room) -> Iterator[Kind]:
    """Two rollout actors; one dies whenever a source is made."""
    env, local = load_env(str(EXAMPLE), {}), room.parts()

    def make() -> GroupSource:
        cluster = FakeCluster(build=lambda recipe: recipe.sampler(local))
        pool = RolloutPool(cluster, 2, recipe_of=ActorRecipe)
        pool.update(Weights(0, dict))
        source = EnvironmentTask(env).source(replace(local, policy=pool))

        async def one_dies() -> None:
            work = asyncio.create_task(source.collector.collect(env.problems("train")[:1], 2, ["warm-up"]))
            while not any(member.groups for member in pool._members):
                await asyncio.sleep(0)
            next(m.actor for m in pool._members if m.groups).kill()  # type: ignore[attr-defined]
            await work

        room.runner.run(asyncio.wait_for(one_dies(), 30))
        return source

    yield Kind(make, room.runner, room.watcher)


KINDS = {"agent loop": agent_loop, "rollout_func": rollout_func, "wire": wire, "queue": queue, "actors": actors}


def columns(number: int, **changes: Any) -> dict[str, Any]:
    """A group of two siblings, as a foreign environment posts it."""
    rows = [[5, 6, 10 + number, 20 + sibling] for sibling in range(2)]
    return {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25 * (number + 1)]] * 2,
        "scores": [1.0, 0.0],
        **changes,
    }


def post(api: httpx.Client, group: Mapping[str, Any]) -> None:
    assert api.post("/scored_data", json=group).status_code == 200


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("palestra/tiny")


@pytest.fixture
def room(loaded: LoadedModel, tmp_path: Path) -> Iterator[Room]:
    with asyncio.Runner() as runner:
        yield Room(loaded, runner, tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, room: Room) -> Iterator[Kind]:
    with KINDS[request.param](room) as made:
        yield made


@pytest.fixture
def on_the_wire(room: Room) -> Iterator[Kind]:
    with wire(room) as made:
        yield made


def content(groups: Sequence[Group]) -> list[Any]:
    """What is trained, to the bit, but for the sampler's last bits: those depend on who shared a batch."""
    return [
        [
            (r.problem_id, r.reward, r.stop, [(t.maker, t.token_ids.tolist(), t.versions.tolist()) for t in r.turns])
            for r in group.rollouts
        ]
        for group in groups
    ]


def logprobs(groups: Sequence[Group]) -> np.ndarray[Any, Any]:
    return np.concatenate([turn.logprobs for group in groups for r in group.rollouts for turn in r.turns])


def assert_same(one: Sequence[Group], other: Sequence[Group]) -> None:
    assert content(one) == content(other)
    np.testing.assert_allclose(logprobs(one), logprobs(other), atol=1e-5)


def test_next_gives_groups_of_siblings_with_a_prompt_and_sampled_tokens(kind: Kind) -> None:
    with closing(kind.make()) as source:
        groups = kind.next(source) + kind.next(source)
        assert len(groups) == 4
        for group in groups:
            assert len(group.rollouts) == 2
            prompts = {tuple(r.turns[0].token_ids.tolist()) for r in group.rollouts}
            assert len(prompts) == 1
            for rollout in group.rollouts:
                assert rollout.turns[0].maker == "template"
                assert rollout.error is None
                assert rollout.sampled_tokens > 0
                assert all(np.isfinite(t.logprobs).all() and (t.logprobs <= 0).all() for t in rollout.turns)
        assert len({str(content([group])) for group in groups}) == 4  # never the same twice
        assert isinstance(source.refills, bool)
        assert source.max_staleness is None or source.max_staleness >= 0
        assert isinstance(source.reward_weights, Mapping)


def test_a_source_that_begins_anew_with_a_state_goes_on_with_the_very_groups_that_would_have_come(kind: Kind) -> None:
    with closing(kind.make()) as first:
        kind.next(first)
        state = json.loads(json.dumps(first.state()))  # it is kept in a checkpoint
        first.commit()
        expected = [kind.next(first), kind.next(first)]
    with closing(kind.make()) as second:
        second.restore(state)
        assert second.state() == state
        for groups in expected:
            assert_same(kind.next(second), groups)


def test_the_state_moves_with_what_is_handed_out_and_with_nothing_else(kind: Kind) -> None:
    with closing(kind.make()) as source:
        begin = source.state()
        kind.next(source)
        first = source.state()
        assert first != begin
        source.commit()
        assert source.state() == first
        kind.next(source)
        assert source.state() not in (begin, first)


def test_without_a_commit_everything_comes_again_from_the_beginning(kind: Kind) -> None:
    with closing(kind.make()) as source:
        expected = [kind.next(source), kind.next(source)]
    with closing(kind.make()) as again:  # killed before its first checkpoint
        again.restore({})
        for groups in expected:
            assert_same(kind.next(again), groups)


def test_the_loop_gathers_a_step_from_every_source(kind: Kind) -> None:
    with closing(kind.make()) as source:
        step = kind.runner.run(gather(source, 2, CONFIG, version=0))
        assert len(step.groups) == 2
        assert step.dropped == 0


def test_batches_that_are_in_a_checkpoint_are_not_kept_at_the_api(on_the_wire: Kind) -> None:
    with closing(on_the_wire.make()) as source:
        first, second = on_the_wire.next(source), on_the_wire.next(source)
        source.commit()
        third = on_the_wire.next(source)  # tells the API what is saved
    with closing(on_the_wire.make()) as again:
        assert_same(on_the_wire.next(again), third)
    assert content(first) != content(second) != content(third)


def test_a_group_that_the_model_cannot_take_is_told_of_and_left_out(on_the_wire: Kind) -> None:
    assert on_the_wire.api is not None
    with closing(on_the_wire.make()) as source:
        for _ in range(5):
            on_the_wire.next(source)
        post(on_the_wire.api, columns(11, tokens=[[5, 6, 10**6, 20]] * 2, masks=[[-100, -100, 10**6, 20]] * 2))
        post(on_the_wire.api, columns(12))
        [group] = on_the_wire.next(source)
    assert group.rollouts[0].turns[1].token_ids.tolist() == [22, 20]
    assert "batch-6/0" in on_the_wire.watcher.notes[-1]
    assert "outside of the vocabulary" in on_the_wire.watcher.notes[-1]


def test_the_model_is_served_until_the_source_is_closed(on_the_wire: Kind) -> None:
    source = on_the_wire.make()
    url = source.serving.url

    async def ask() -> int:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{url}/health", timeout=20)).status_code

    assert on_the_wire.runner.run(ask()) == 200
    source.close()
    with pytest.raises(httpx.ConnectError):
        on_the_wire.runner.run(ask())
