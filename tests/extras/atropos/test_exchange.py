"""The exchange between environments and a trainer, without HTTP; batches are exact, whole, and oldest first."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.errors import InputError, SettingError, StorageError
from palestra.extras.atropos import journal
from palestra.extras.atropos.exchange import Exchange as RealExchange
from palestra.extras.atropos.exchange import PostedGroup, QueueFull, UnknownEnv, next_batch
from palestra.extras.atropos.journal import Queued
from palestra.extras.atropos.protocol import EnvRegistration, Registration, ScoredGroup

ENV = EnvRegistration(max_token_length=8, desired_name="e", group_size=2)


def group(size: int = 2, first: int = 0, env_id: int | None = None) -> PostedGroup:
    rows = [[first, 1, 2]] * size
    return PostedGroup.of(ScoredGroup(tokens=rows, masks=[[-100, 1, 2]] * size, scores=[0.0] * size, env_id=env_id))


def firsts(delivery) -> list[int]:
    return [json.loads(body)["tokens"][0][0] for body in delivery.groups]


def trainer(batch_size: int = 4, step: int = 0, run: str = "a") -> Registration:
    return Registration(
        batch_size=batch_size, max_token_len=64, num_steps=10, starting_step=step, checkpoint_dir=f"runs/{run}"
    )


OPEN: dict[Exchange, None] = {}


class Exchange(RealExchange):
    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        OPEN[self] = None

    def close(self) -> None:
        if OPEN.pop(self, self) is None:
            super().close()


@pytest.fixture(autouse=True)
def _close_all():
    yield
    for exchange in list(OPEN):
        exchange.close()


async def started(folder, batch_size: int = 4, **options) -> Exchange:
    exchange = Exchange(folder, **options)
    await exchange.register(trainer(batch_size))
    assert await exchange.take() is None
    return exchange


async def test_groups_come_out_oldest_first_and_once(tmp_path):
    exchange = await started(tmp_path)
    for i in range(5):
        assert await exchange.add([group(first=i)], key=f"key {i}")
        assert not await exchange.add([group(first=i)], key=f"key {i}"), "a post with a key counts once"
    assert firsts(await exchange.take()) == [0, 1]
    assert firsts(await exchange.take()) == [2, 3]
    assert await exchange.take() is None
    assert exchange.step == 2


async def test_everything_is_there_after_a_restart(tmp_path):
    exchange = await started(tmp_path)
    env = await exchange.register_env(ENV)
    await exchange.add([group(first=i, env_id=env.id) for i in range(3)])
    await exchange.take()
    exchange.close()
    again = Exchange(tmp_path)
    assert again.registration == exchange.registration
    assert again.envs == [env]
    assert (again.step, again.started, again.waiting_sequences) == (1, True, 2)


async def test_batch_whose_answer_was_lost_is_given_again_until_it_is_acknowledged(tmp_path):
    exchange = await started(tmp_path)
    await exchange.add([group(first=i) for i in range(4)])
    first = await exchange.take(after=0)
    assert await exchange.take(after=0) == first
    exchange.close()
    again = Exchange(tmp_path)
    assert await again.take(after=0) == first
    second = await again.take(after=first.number)
    assert firsts(second) == [2, 3]
    assert await again.take(after=second.number) is None


async def test_batches_since_the_last_checkpoint_come_again_in_order_and_count_once(tmp_path):
    """The trainer is killed after four batches with a checkpoint after the second; then the API is, too."""

    async def first_life():
        exchange = await started(tmp_path, batch_size=2)
        await exchange.add([group(first=i) for i in range(5)])
        deliveries = [await exchange.take(after=n, saved=2 if n > 2 else 0) for n in range(4)]
        assert [d.number for d in deliveries] == [1, 2, 3, 4]
        assert exchange.step == 4
        exchange.close()
        return deliveries

    async def second_life(made):
        exchange = Exchange(tmp_path)
        await exchange.register(trainer(2, step=2))
        assert exchange.step == 2, "that of the checkpoint"
        assert await exchange.take(after=2, saved=2) == made[2]
        assert exchange.step == 3
        assert await exchange.take(after=2, saved=2) == made[2], "its answer was lost"
        assert exchange.step == 3, "and it counts once"
        exchange.close()
        exchange = Exchange(tmp_path)  # the API alone is restarted: the trainer does not register again
        assert exchange.step == 3
        assert await exchange.take(after=2, saved=2) == made[2]
        assert exchange.step == 3
        assert await exchange.take(after=3, saved=2) == made[3]
        assert exchange.step == 4
        fresh = await exchange.take(after=4, saved=2)
        assert (fresh.number, firsts(fresh), exchange.step) == (5, [4], 5)
        assert await exchange.take(after=5, saved=4) is None
        exchange.close()

    await second_life(await first_life())


async def test_batches_in_a_checkpoint_are_forgotten_and_others_are_kept(tmp_path):
    exchange = await started(tmp_path, batch_size=2)
    await exchange.add([group(first=i) for i in range(4)])
    for after, saved in ((0, 0), (1, 0), (2, 0), (3, 2)):
        await exchange.take(after, saved)
    exchange.close()
    again = Exchange(tmp_path)
    # a trainer that asks for what it said to have saved gets what comes after
    assert (await again.take(after=0, saved=0)).number == 3


async def test_batches_of_one_run_are_not_given_to_the_next(tmp_path):
    exchange = await started(tmp_path, batch_size=2)
    await exchange.add([group(first=i) for i in range(3)])
    assert firsts(await exchange.take(after=0, saved=0)) == [0]
    assert firsts(await exchange.take(after=1, saved=0)) == [1]
    await exchange.register(trainer(2, run="b"))
    delivery = await exchange.take(after=0, saved=0)
    assert (firsts(delivery), delivery.number, exchange.step) == ([2], 3, 1)


async def test_full_queue_refuses_and_a_list_is_taken_whole_or_not_at_all(tmp_path):
    exchange = await started(tmp_path, max_waiting=5)
    with pytest.raises(QueueFull):
        await exchange.add([group(), group(), group()])
    await exchange.add([group(), group()])
    with pytest.raises(QueueFull):
        await exchange.add([group()])
    await exchange.take()
    await exchange.add([group()])


async def test_unknown_environments_too_large_groups_and_a_second_server_are_refused(tmp_path):
    exchange = await started(tmp_path)
    with pytest.raises(UnknownEnv):
        await exchange.add([group(env_id=3)])
    with pytest.raises(UnknownEnv):
        exchange.env_status(-1)
    with pytest.raises(InputError, match="never be delivered"):
        await exchange.add([group(size=5)])
    exchange.registration = exchange.registration.model_copy(update={"max_token_len": 2})
    with pytest.raises(InputError, match="max_token_len"):
        await exchange.add([group()])
    with pytest.raises(StorageError, match="another --folder"):
        Exchange(tmp_path)


async def test_status_of_an_environment_counts_in_its_own_groups(tmp_path):
    exchange = await started(tmp_path, batch_size=8)
    for weight, least in ((1.0, None), (3.0, 0.25)):
        await exchange.register_env(ENV.model_copy(update={"weight": weight, "min_batch_allocation": least}))
    await exchange.add([group(env_id=0), group(env_id=1), group(env_id=1)])
    status = exchange.env_status(0)
    # its own 2 sequences, and of the other's 4 those beyond its minimum of 2
    assert status["queue_size"] == 2
    assert status["self_queue_size"] == 1
    assert status["env_weight"] == 0.25
    assert status["unallocated_fraction"] == 0.75


async def test_the_queue_is_bounded_in_bytes_and_counts_what_is_taken(tmp_path):
    exchange = await started(tmp_path, batch_size=2)
    exchange.max_bytes = 3 * len(group().body)
    await exchange.add([group(), group(), group()])
    with pytest.raises(QueueFull, match="MiB wait already"):
        await exchange.add([group()])
    await exchange.take()
    await exchange.add([group()])
    assert exchange.waiting_bytes == 3 * len(group().body)
    exchange.close()
    again = Exchange(tmp_path)
    assert again.waiting_bytes == exchange.waiting_bytes


async def test_groups_that_never_make_a_batch_are_told(tmp_path):
    exchange = await started(tmp_path, batch_size=6)
    await exchange.add([group(4)])
    assert exchange.why_no_batch() is None, "more may come"
    await exchange.add([group(4)])
    assert await exchange.take() is None
    assert "8 sequences wait in groups of 4, which never add up to a batch of 6" in exchange.why_no_batch()
    await exchange.register_env(ENV)
    assert exchange.why_no_batch() is None, "an environment with groups of 2 may fill it"
    exchange.max_waiting = 9
    assert "the queue is full" in exchange.why_no_batch()


async def test_registrations_are_bounded_one_row_each_and_survive(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.extras.atropos.exchange._MAX_ENVS", 3)
    exchange = await started(tmp_path)
    envs = [await exchange.register_env(ENV) for _ in range(3)]
    assert [env.name for env in envs] == ["e_0", "e_1", "e_2"]
    with pytest.raises(QueueFull, match="3 environments have registered"):
        await exchange.register_env(ENV)
    await exchange.disconnect_env(1)
    assert "envs" not in exchange.journal.read(journal.facts), "not all of them anew each time"
    exchange.close()
    again = Exchange(tmp_path)
    assert [(env.name, env.connected) for env in again.envs] == [("e_0", True), ("e_1", False), ("e_2", True)]


async def test_environments_in_the_journal_of_an_older_version_are_kept(tmp_path):
    old = {"id": 0, "name": "e_0", "desired_name": "e", "weight": 1.0, "max_token_length": 8, "group_size": 2}
    exchange = Exchange(tmp_path)
    facts = {"envs": [old | {"min_batch_allocation": None}]}
    await exchange.journal.do(lambda db: journal.set_facts(db, **facts))
    exchange.close()
    for _ in range(2):
        exchange = Exchange(tmp_path)
        assert [env.name for env in exchange.envs] == ["e_0"]
        exchange.close()


async def test_a_batch_on_which_the_trainer_died_three_times_is_set_aside_in_a_file(tmp_path):
    """Its checkpoint holds batch 1; it always dies on batch 3. The API is started anew with each life."""

    async def life() -> list[int]:
        exchange = Exchange(tmp_path)
        await exchange.register(trainer(2, step=1))
        numbers, after = [], 1
        while after != 3 and (delivery := await exchange.take(after=after, saved=1)) is not None:
            after = delivery.number
            numbers.append(after)
        exchange.close()
        return numbers

    exchange = await started(tmp_path, batch_size=2)
    await exchange.add([group(first=i) for i in range(5)])
    assert (await exchange.take(after=0)).number == 1
    exchange.close()
    assert [await life() for _ in range(3)] == [[2, 3]] * 3
    assert await life() == [2, 4, 5], "without 3"
    (aside,) = tmp_path.glob("set-aside*")
    assert aside.name == "set-aside-batch-3.jsonl"
    assert json.loads(aside.read_text())["tokens"][0][0] == 2


async def test_a_trainer_that_was_killed_at_different_places_or_while_it_waits_loses_nothing(tmp_path):
    async def life(until: int) -> list[int]:
        exchange = Exchange(tmp_path)
        await exchange.register(trainer(2))
        numbers = []
        for after in range(until):
            delivery = await exchange.take(after=after, saved=0)
            numbers.append(delivery and delivery.number)
        exchange.close()
        return numbers

    exchange = await started(tmp_path, batch_size=2)
    await exchange.add([group(first=i) for i in range(3)])
    exchange.close()
    for until in (1, 2, 1, 2, 1, 2):
        assert await life(until) == list(range(1, until + 1))
    for _ in range(5):
        assert await life(4) == [1, 2, 3, None], "the third was trained when it asked for the fourth"


async def test_the_step_is_the_trainers_own_where_it_tells_it(tmp_path):
    exchange = await started(tmp_path, batch_size=2)
    await exchange.add([group(first=i) for i in range(3)])
    await exchange.take(after=0, saved=0, step=0)
    await exchange.take(after=1, saved=0, step=0)  # nothing in batch 1 could be trained
    assert exchange.step == 1
    await exchange.take(after=1, saved=0, step=0)
    assert exchange.step == 1
    await exchange.take(after=2, saved=0, step=1)
    assert exchange.step == 2


async def test_a_batch_that_was_never_made_cannot_be_acknowledged(tmp_path):
    exchange = await started(tmp_path, batch_size=2)
    await exchange.add([group(), group()])
    first = await exchange.take(after=0)
    with pytest.raises(SettingError, match="the last batch that was made here is 1"):
        await exchange.take(after=10**9)
    assert await exchange.take(after=0) == first, "and nothing is forgotten"
    await exchange.register(trainer(2, step=50, run="b"))
    assert (await exchange.take(after=50)).number == 51, "a run that was made at an API with another journal"


def queue(*groups: tuple[int, int]) -> list[Queued]:
    return [Queued(i, env, size) for i, (env, size) in enumerate(groups, 1)]


@pytest.mark.parametrize(
    ("groups", "batch_size", "minimums", "expected"),
    [
        ([(0, 2)] * 3, 4, {}, [1, 2]),
        ([(0, 3), (0, 4), (0, 4)], 8, {}, [2, 3]),
        ([(0, 3), (0, 2), (0, 2)], 4, {}, [2, 3]),
        ([(0, 4)], 8, {}, None),
        ([], 8, {}, None),
        ([(0, 2)] * 10 + [(1, 2)] * 2, 8, {1: 0.5}, [1, 2, 11, 12]),
        ([(0, 2)] * 10, 8, {1: 0.25}, None),
        ([(0, 1)] * 5 + [(1, 3)], 8, {1: 0.25}, [1, 2, 3, 4, 5, 6]),
        ([(0, 1)] * 8 + [(1, 1)] * 8, 8, {0: 1.0, 1: 1.0}, [1, 2, 3, 4, 9, 10, 11, 12]),
    ],
    ids=[
        "exact and oldest first", "one that does not fit waits", "where greedy fails", "too few", "none",
        "a minimum though others came first", "waits for a minimum", "a minimum is exceeded",
        "minimums are scaled down",
    ],
)  # fmt: skip
def test_the_next_batch(groups, batch_size, minimums, expected):
    batch = next_batch(queue(*groups), batch_size, minimums)
    assert (batch and [group.id for group in batch]) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=9),
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 2), st.sampled_from([0.25, 0.5]), max_size=2),
)
def test_a_batch_is_made_exactly_when_one_exists(groups, batch_size, minimums):
    waiting = queue(*groups)
    least = {env: int(batch_size * share) for env, share in minimums.items()}

    def fits(part: tuple[Queued, ...]) -> bool:
        shares = all(sum(g.sequences for g in part if g.env_id == env) >= n for env, n in least.items())
        return sum(g.sequences for g in part) == batch_size and shares

    possible = any(fits(part) for n in range(len(waiting) + 1) for part in itertools.combinations(waiting, n))
    batch = next_batch(waiting, batch_size, minimums)
    assert (batch is not None) == possible
    if batch is not None:
        assert fits(tuple(batch))
        assert [g.id for g in batch] == sorted({g.id for g in batch})
