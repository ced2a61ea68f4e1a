"""The policy in this process: batches, the tool barrier, and a copy to sample from."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_engine import small_model
from transformers import Qwen3ForCausalLM

from palestra.core.errors import SettingError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.engine.session import Session
from palestra.models.loading import load_model
from palestra.policy import local
from palestra.policy.local import LocalPolicy, ToolBarrier, sampling_copy

PROMPT = [5, 9, 33, 21, 60, 2]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return small_model()


@pytest.fixture(params=["in turns", "overlapped"])
def policy(model: Qwen3ForCausalLM, request: pytest.FixtureRequest) -> LocalPolicy:
    """`overlapped`: as on a GPU, where callers go on while the next step computes."""
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    policy.engine.runner.overlaps = request.param == "overlapped"
    return policy


def note_steps(policy: LocalPolicy, events: list[Any]) -> None:
    """Add the number of sessions in each step from here on."""
    launch = policy.engine.runner.launch
    policy.engine.runner.launch = lambda chunks: (events.append(len(chunks)), launch(chunks))[1]  # type: ignore[method-assign]


def overlapping_policy(model: Qwen3ForCausalLM) -> tuple[LocalPolicy, list[Any]]:
    """A policy as on a GPU, and a list to which it adds the sizes of its steps."""
    policy, events = LocalPolicy(model, kv_memory_gib=0.01, self_check=False), list[Any]()
    policy.engine.runner.overlaps = True
    note_steps(policy, events)
    return policy, events


def test_where_steps_overlap_a_caller_goes_on_while_the_next_one_computes_and_joins_the_one_after(model):
    policy, events = overlapping_policy(model)

    async def twice() -> None:
        session = policy.open(PROMPT)
        await policy.sample(session, SamplingParams(max_new_tokens=1))
        events.append("its tool")
        policy.append(session, [7, 8])
        await policy.sample(session, SamplingParams(max_new_tokens=1))

    async def main() -> None:
        long = policy.sample(policy.open(PROMPT), SamplingParams(max_new_tokens=4))
        await asyncio.gather(twice(), long)

    asyncio.run(main())
    assert events == [2, 1, "its tool", 2, 1]


def test_weights_that_come_while_a_step_computes_count_from_the_next_one_on(policy: LocalPolicy) -> None:
    async def main(update: bool) -> Turn:
        turn = asyncio.create_task(policy.sample(policy.open(PROMPT), SamplingParams(max_new_tokens=8, seed=1)))
        for _ in range(8):
            await asyncio.sleep(0)
        if update:
            policy.update(Weights(5, dict, policy.engine.model))
        return await turn

    expected, got = asyncio.run(main(False)), asyncio.run(main(True))
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert set(got.versions) == {0, 5}
    assert got.versions.tolist() == sorted(got.versions)


def test_a_session_is_branched_while_a_step_computes_it(policy: LocalPolicy) -> None:
    async def main() -> tuple[Turn, Turn, Turn]:
        session = policy.open(PROMPT)
        await policy.sample(session, SamplingParams(max_new_tokens=2, seed=1))
        known = list(session.token_ids)
        under_way = asyncio.create_task(policy.sample(session, SamplingParams(max_new_tokens=8, seed=2)))
        while len(session.token_ids) < len(known) + 2:
            await asyncio.sleep(0)
        branch = policy.branch(session, len(known))
        assert branch.kv_len >= len(known) - 2  # the last token of a turn is computed with the next
        turn = await policy.sample(branch, SamplingParams(max_new_tokens=6, seed=3))
        fresh = await policy.sample(policy.open(known), SamplingParams(max_new_tokens=6, seed=3))
        return turn, fresh, await under_way

    turn, fresh, whole = asyncio.run(main())
    assert turn.token_ids.tolist() == fresh.token_ids.tolist()
    assert turn.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
    assert len(whole.token_ids) == 8


def test_where_steps_overlap_turns_that_ended_together_are_handed_out_in_portions_with_a_step_in_between(
    model, monkeypatch
):
    monkeypatch.setattr(LocalPolicy, "turns_at_once", 2)
    policy, events = overlapping_policy(model)

    async def twice() -> None:
        session = policy.open(PROMPT)
        await policy.sample(session, SamplingParams(max_new_tokens=1, temperature=0.0))
        events.append("turn")
        policy.append(session, [7])
        await policy.sample(session, SamplingParams(max_new_tokens=1, temperature=0.0))
        policy.close(session)

    async def all_of_them() -> None:
        await asyncio.gather(*(twice() for _ in range(5)))

    asyncio.run(all_of_them())
    begin = events.index("turn")
    assert events[begin : begin + 8] == ["turn", "turn", 2, "turn", "turn", 2, "turn", 1]


def test_turns_that_come_one_upon_the_other_begin_with_the_same_step(model: Qwen3ForCausalLM) -> None:
    """As those of agents that are programs: the next request is read from its socket while the last one is handled."""
    policy, sizes = LocalPolicy(model, kv_memory_gib=0.01, self_check=False), list[int]()
    note_steps(policy, sizes)

    async def main() -> None:
        turns = []
        for _ in range(20):
            turns.append(asyncio.create_task(policy.sample(policy.open(PROMPT), SamplingParams(max_new_tokens=2))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*turns)

    asyncio.run(main())
    assert sizes == [20, 20]


def test_concurrent_turns_share_steps(policy: LocalPolicy) -> None:
    sizes = list[int]()
    note_steps(policy, sizes)

    async def main() -> list[Turn]:
        group = policy.fork(policy.open(PROMPT), 6)
        return await asyncio.gather(*(policy.sample(s, SamplingParams(10, seed=i)) for i, s in enumerate(group)))

    turns = asyncio.run(main())
    assert all(len(turn.token_ids) == len(turn.logprobs) == 10 for turn in turns)
    assert len({tuple(turn.token_ids) for turn in turns}) > 1
    assert sizes == [1, *[6] * 10]  # the prompt once, then ten tokens of all six


def test_other_coroutines_run_while_a_turn_is_sampled(policy: LocalPolicy) -> None:
    async def main() -> int:
        ticks = 0

        async def tool() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tool())
        await policy.sample(policy.open(PROMPT), SamplingParams(max_new_tokens=20))
        ticking.cancel()
        return ticks

    assert asyncio.run(main()) >= 19


def test_cancelled_caller_frees_its_work_and_its_pages(policy: LocalPolicy) -> None:
    async def main() -> None:
        session = policy.open(PROMPT)
        other = policy.open(PROMPT)
        task = asyncio.create_task(policy.sample(session, SamplingParams(max_new_tokens=100)))
        beside = asyncio.create_task(policy.sample(other, SamplingParams(max_new_tokens=12)))
        await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert len((await beside).token_ids) == 12
        policy.close(session)
        policy.close(other)

    asyncio.run(main())
    assert not policy.engine.busy
    assert policy.engine.pool.free == policy.engine.pool.pages


def test_closing_a_session_ends_its_turn_as_cancelled(policy: LocalPolicy) -> None:
    async def main() -> Turn:
        session = policy.open(PROMPT)
        task = asyncio.create_task(policy.sample(session, SamplingParams(max_new_tokens=100)))
        for _ in range(5):
            await asyncio.sleep(0)
        policy.close(session)
        return await task

    assert asyncio.run(main()).finish == "cancelled"


def test_a_failing_step_fails_the_turn_and_not_the_next_one(policy: LocalPolicy) -> None:
    step = policy.engine.runner.step

    def broken(chunks):  # type: ignore[no-untyped-def]
        raise RuntimeError("no")

    async def main() -> None:
        session = policy.open(PROMPT)
        policy.engine.runner.step = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no"):
            await policy.sample(session, SamplingParams(max_new_tokens=4))
        policy.engine.runner.step = step  # type: ignore[method-assign]
        assert len((await policy.sample(session, SamplingParams(max_new_tokens=4))).token_ids) == 4

    asyncio.run(main())


def test_weights_of_the_engines_own_module_are_not_copied(model: Qwen3ForCausalLM) -> None:
    def read() -> dict[str, torch.Tensor]:
        raise AssertionError("nothing needs reading")

    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    policy.update(Weights(3, read, model))
    assert policy.version == 3
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"lm_head.weight": torch.zeros(3, 3)}, "lm_head.weight of shape"),
        ({"lora.weight": torch.zeros(3)}, "lora.weight of shape"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(model, tensors, complaint):
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    norm = model.model.norm.weight
    before = norm.clone()
    with pytest.raises(SettingError, match=complaint):
        policy.update(Weights(1, lambda: {"model.norm.weight": torch.zeros_like(norm), **tensors}))
    assert torch.equal(norm, before)
    assert policy.version == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The barrier's clock, which stands still unless a test moves it."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(local, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def run_tool(barrier: ToolBarrier, clock: SimpleNamespace, seconds: float = 0.0, sessions: int = 1) -> bool:
    """Let `sessions` sessions run a tool at once; returns whether a step waits for them."""

    async def step() -> bool:
        away = [Session([1]) for _ in range(sessions)]
        for session in away:
            barrier.turn_ended(session)
        waiting = asyncio.create_task(barrier.wait())
        for _ in range(4):
            await asyncio.sleep(0)
        waits = not waiting.done()
        clock.now += seconds
        for session in away:
            barrier.came_back(session)
        await waiting
        return waits

    return asyncio.run(step())


def test_steps_wait_for_quick_tools_also_on_a_busy_machine(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier()
    for _ in range(10):
        assert run_tool(barrier, clock, 0.6, sessions=64), "a pause of the machine counts once"
        assert all(run_tool(barrier, clock, 0.04) for _ in range(600))


def test_slow_tools_soon_delay_no_step_until_tools_are_quick_again(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier()
    waits = [run_tool(barrier, clock, 0.2) for _ in range(100)]
    assert waits == [True] * 5 + [False] * 95
    waits = [run_tool(barrier, clock, 0.04) for _ in range(100)]
    assert waits == [False] * 50 + [True] * 50
    assert run_tool(barrier, clock, 60.0)
    assert not run_tool(barrier, clock)


def test_a_step_does_not_wait_any_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_PATIENCE_S", 0.06)
    barrier = ToolBarrier()

    async def step() -> None:
        barrier.turn_ended(Session([1]))
        await asyncio.wait_for(barrier.wait(), 60)

    asyncio.run(step())
    assert not run_tool(barrier, SimpleNamespace(now=0.0))


def test_a_barrier_for_all_waits_for_slow_tools_however_long(clock: SimpleNamespace) -> None:
    barrier = ToolBarrier(waits_for_all=True)
    assert all(run_tool(barrier, clock, 1000.0) for _ in range(16))


def test_nobody_waits_for_a_session_that_is_away() -> None:
    barrier = ToolBarrier(waits_for_all=True)

    async def step() -> None:
        session = Session([1])
        barrier.turn_ended(session)
        asyncio.get_running_loop().call_soon(barrier.forget, session)
        await asyncio.wait_for(barrier.wait(), 60)

    asyncio.run(step())


def test_the_first_step_waits_for_turns_that_were_announced(model: Qwen3ForCausalLM) -> None:
    policy, sizes = LocalPolicy(model, kv_memory_gib=0.01, self_check=False), list[int]()
    note_steps(policy, sizes)

    async def main() -> None:
        policy.expect(4)
        first = [asyncio.create_task(policy.sample(policy.open(PROMPT), SamplingParams(2))) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert sizes == []
        policy.expect(-1)  # one of them could not begin
        await asyncio.gather(*first, policy.sample(policy.open(PROMPT), SamplingParams(2)))

    asyncio.run(main())
    assert sizes == [3, 3]


PINNED_PROMPT = [5, 9, 33, 21, 60, 2, 7, 44]


def tiny(kind: str) -> Any:
    model = load_model("palestra/tiny").model
    if kind == "full":
        return model
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def trainable(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def train(model: Any) -> None:
    """A few steps of an optimizer that writes in place."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids = torch.tensor([PINNED_PROMPT])
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def turns(policy: LocalPolicy) -> list[Turn]:
    async def main() -> list[Turn]:
        group = policy.fork(policy.open(PINNED_PROMPT), 3)
        made = await asyncio.gather(*(policy.sample(s, SamplingParams(12, seed=i)) for i, s in enumerate(group)))
        for session in group:
            policy.close(session)
        return list(made)

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_policy_on_a_copy_samples_its_version_until_it_is_updated(kind: str) -> None:
    model = tiny(kind)
    policy = LocalPolicy(sampling_copy(model), kv_memory_gib=0.05, self_check=False)
    before = turns(policy)
    train(model)
    assert turns(policy) == before, "the copy must not see the training"
    assert all(turn.versions.tolist() == [0] * 12 for turn in before)

    policy.update(Weights(1, lambda: trainable(model), model))
    after = turns(policy)
    expected = turns(LocalPolicy(model, kv_memory_gib=0.05, self_check=False))
    assert [turn.token_ids.tolist() for turn in after] == [turn.token_ids.tolist() for turn in expected]
    assert [turn.token_ids.tolist() for turn in after] != [turn.token_ids.tolist() for turn in before]
    assert all(turn.versions.tolist() == [1] * 12 for turn in after)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_copy_shares_what_is_frozen_and_owns_what_is_trained(kind: str) -> None:
    model = tiny(kind)
    copied = dict(sampling_copy(model).named_parameters())
    owned = 0
    for name, parameter in model.named_parameters():
        assert (copied[name].data_ptr() == parameter.data_ptr()) == (not parameter.requires_grad), name
        assert not copied[name].requires_grad
        owned += parameter.requires_grad
    assert owned == len(trainable(model)) > 0
    train(model)  # the original can still be trained


def test_tied_weights_stay_tied_in_the_copy() -> None:
    model = tiny("full")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    copied = sampling_copy(model)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    assert copied.lm_head.weight is not model.lm_head.weight
