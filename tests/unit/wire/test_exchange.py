"""The exchange between environments and a trainer, without HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from palestra.core.errors import PalestraError
from palestra.wire.exchange import Exchange, QueueFull, UnknownEnv
from palestra.wire.types import EnvRegistration, Registration, ScoredGroup


def group(size: int = 2, first: int = 0, env_id: int | None = None) -> ScoredGroup:
    rows = [[first, 1, 2]] * size
    return ScoredGroup(tokens=rows, masks=[[-100, 1, 2]] * size, scores=[0.0] * size, env_id=env_id)


def firsts(delivery) -> list[int]:
    return [json.loads(body)["tokens"][0][0] for body in delivery.groups]


def trainer(batch_size: int = 4, step: int = 0, run: str = "a") -> Registration:
    return Registration(
        batch_size=batch_size, max_token_len=64, num_steps=10, starting_step=step, checkpoint_dir=f"runs/{run}"
    )


async def started(folder, batch_size: int = 4, **options) -> Exchange:
    exchange = Exchange(folder, **options)
    await exchange.register(trainer(batch_size))
    assert await exchange.take() is None
    return exchange


def test_groups_come_out_oldest_first_and_once(tmp_path):
    async def scenario():
        exchange = await started(tmp_path)
        for i in range(5):
            await exchange.add([group(first=i)])
        assert firsts(await exchange.take()) == [0, 1]
        assert firsts(await exchange.take()) == [2, 3]
        assert await exchange.take() is None
        assert exchange.step == 2
        exchange.close()

    asyncio.run(scenario())


def test_everything_is_there_after_a_restart(tmp_path):
    async def scenario():
        exchange = await started(tmp_path)
        env = await exchange.register_env(EnvRegistration(max_token_length=8, desired_name="e", group_size=2))
        await exchange.add([group(first=i, env_id=env.id) for i in range(3)])
        await exchange.take()
        exchange.close()
        again = Exchange(tmp_path)
        assert again.registration == exchange.registration
        assert again.envs == [env]
        assert (again.step, again.started, again.waiting_sequences) == (1, True, 2)
        again.close()

    asyncio.run(scenario())


def test_batch_whose_answer_was_lost_is_given_again_until_it_is_acknowledged(tmp_path):
    async def scenario():
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
        again.close()

    asyncio.run(scenario())


def test_batches_since_the_last_checkpoint_come_again_in_order_and_count_once(tmp_path):
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

    made = asyncio.run(first_life())
    asyncio.run(second_life(made))


def test_batches_in_a_checkpoint_are_forgotten_and_others_are_kept(tmp_path):
    async def scenario():
        exchange = await started(tmp_path, batch_size=2)
        await exchange.add([group(first=i) for i in range(4)])
        for after, saved in ((0, 0), (1, 0), (2, 0), (3, 2)):
            await exchange.take(after, saved)
        exchange.close()
        again = Exchange(tmp_path)
        # a trainer that asks for what it said to have saved gets what comes after
        assert (await again.take(after=0, saved=0)).number == 3
        again.close()

    asyncio.run(scenario())


def test_batches_of_one_run_are_not_given_to_the_next(tmp_path):
    async def scenario():
        exchange = await started(tmp_path, batch_size=2)
        await exchange.add([group(first=i) for i in range(3)])
        assert firsts(await exchange.take(after=0, saved=0)) == [0]
        assert firsts(await exchange.take(after=1, saved=0)) == [1]
        await exchange.register(trainer(2, run="b"))
        delivery = await exchange.take(after=0, saved=0)
        assert (firsts(delivery), delivery.number, exchange.step) == ([2], 3, 1)
        exchange.close()

    asyncio.run(scenario())


def test_trainer_that_is_ahead_of_a_new_folder_gets_higher_numbers(tmp_path):
    async def scenario():
        exchange = await started(tmp_path, batch_size=2)
        await exchange.add([group()])
        assert (await exchange.take(after=7)).number == 8
        exchange.close()

    asyncio.run(scenario())


def test_post_with_a_key_counts_once(tmp_path):
    async def scenario():
        exchange = await started(tmp_path)
        assert await exchange.add([group()], "a")
        assert not await exchange.add([group()], "a")
        assert exchange.waiting_sequences == 2
        exchange.close()

    asyncio.run(scenario())


def test_full_queue_refuses_and_a_list_is_taken_whole_or_not_at_all(tmp_path):
    async def scenario():
        exchange = await started(tmp_path, max_waiting=5)
        with pytest.raises(QueueFull):
            await exchange.add([group(), group(), group()])
        await exchange.add([group(), group()])
        with pytest.raises(QueueFull):
            await exchange.add([group()])
        await exchange.take()
        await exchange.add([group()])
        exchange.close()

    asyncio.run(scenario())


def test_unknown_environments_and_groups_larger_than_a_batch_are_refused(tmp_path):
    async def scenario():
        exchange = await started(tmp_path)
        with pytest.raises(UnknownEnv):
            await exchange.add([group(env_id=3)])
        with pytest.raises(UnknownEnv):
            exchange.env_status(-1)
        with pytest.raises(PalestraError, match="never be delivered"):
            await exchange.add([group(size=5)])
        exchange.close()

    asyncio.run(scenario())


def test_status_of_an_environment_counts_in_its_own_groups(tmp_path):
    async def scenario():
        exchange = await started(tmp_path, batch_size=8)
        for weight, least in ((1.0, None), (3.0, 0.25)):
            await exchange.register_env(
                EnvRegistration(
                    max_token_length=8, desired_name="e", weight=weight, group_size=2, min_batch_allocation=least
                )
            )
        await exchange.add([group(env_id=0), group(env_id=1), group(env_id=1)])
        status = exchange.env_status(0)
        # its own 2 sequences, and of the other's 4 those beyond its minimum of 2
        assert status["queue_size"] == 2
        assert status["self_queue_size"] == 1
        assert status["env_weight"] == 0.25
        assert status["unallocated_fraction"] == 0.75
        exchange.close()

    asyncio.run(scenario())


def test_two_servers_on_one_folder_are_refused(tmp_path):
    async def scenario():
        exchange = await started(tmp_path)
        with pytest.raises(PalestraError, match="another --folder"):
            Exchange(tmp_path)
        exchange.close()

    asyncio.run(scenario())
