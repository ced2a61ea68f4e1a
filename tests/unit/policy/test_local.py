"""The local policy: batched, cancellable, and no obstacle to other coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import copy

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.policy import local
from palestra.policy.local import LocalPolicy

PROMPT = [5, 9, 33, 21, 60, 2]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(params=["in turns", "overlapped"])
def policy(model: Qwen3ForCausalLM, request: pytest.FixtureRequest) -> LocalPolicy:
    """`overlapped`: as on a GPU, where callers go on while the next step computes."""
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    policy.engine.runner.overlaps = request.param == "overlapped"
    return policy


def overlapping_policy(model: Qwen3ForCausalLM) -> tuple[LocalPolicy, list[str]]:
    """A policy as on a GPU, and a list to which it adds its steps."""
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    policy.engine.runner.overlaps = True
    events: list[str] = []
    launch = policy.engine.runner.launch

    def logged(chunks):  # type: ignore[no-untyped-def]
        events.append(f"step of {len(chunks)}")
        return launch(chunks)

    policy.engine.runner.launch = logged  # type: ignore[method-assign]
    return policy, events


def test_where_steps_overlap_a_caller_goes_on_while_the_next_one_computes_and_joins_the_one_after(
    model: Qwen3ForCausalLM,
) -> None:
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
    assert events == ["step of 2", "step of 1", "its tool", "step of 2", "step of 1"]


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
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_TURNS_AT_ONCE", 2)
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
    assert events[begin : begin + 8] == ["turn", "turn", "step of 2", "turn", "turn", "step of 2", "turn", "step of 1"]


def test_turns_that_come_one_upon_the_other_begin_with_the_same_step(model: Qwen3ForCausalLM) -> None:
    """As those of agents that are programs: the next request is read from its socket while the last one is handled."""
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    sizes: list[int] = []
    step = policy.engine.runner.step

    def noted(chunks):  # type: ignore[no-untyped-def]
        sizes.append(len(chunks))
        return step(chunks)

    policy.engine.runner.step = noted  # type: ignore[method-assign]

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
    steps = 0
    step = policy.engine.runner.step

    def counted(chunks):  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += 1
        return step(chunks)

    policy.engine.runner.step = counted  # type: ignore[method-assign]

    async def main() -> list[Turn]:
        group = policy.fork(policy.open(PROMPT), 6)
        params = [SamplingParams(max_new_tokens=10, seed=i) for i in range(6)]
        return await asyncio.gather(*(policy.sample(s, p) for s, p in zip(group, params, strict=True)))

    turns = asyncio.run(main())
    assert all(len(turn.token_ids) == len(turn.logprobs) == 10 for turn in turns)
    assert len({tuple(turn.token_ids) for turn in turns}) > 1
    assert steps == 11  # the prompt once, then ten tokens of all six


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


def test_policy_works_in_a_second_event_loop(policy: LocalPolicy) -> None:
    async def main() -> Turn:
        session = policy.open(PROMPT)
        turn = await policy.sample(session, SamplingParams(max_new_tokens=4, seed=3))
        policy.close(session)
        return turn

    assert asyncio.run(main()) == asyncio.run(main())


def test_new_weights_are_sampled_with_a_new_version(model: Qwen3ForCausalLM) -> None:
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)

    async def turn() -> Turn:
        return await policy.sample(session, SamplingParams(max_new_tokens=3, temperature=0.0))

    session = policy.open(PROMPT)
    assert asyncio.run(turn()).versions.tolist() == [0, 0, 0]
    original = model.lm_head.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    try:
        policy.update(Weights(7, dict, model))
        assert session.kv_len == 0
        got = asyncio.run(turn())
        ids = torch.tensor([session.token_ids])
        with torch.no_grad():
            expected = model(input_ids=ids).logits[0, -4:-1].argmax(-1)
        assert policy.version == 7
        assert got.versions.tolist() == [7, 7, 7]
        assert got.token_ids.tolist() == expected.tolist()
    finally:
        with torch.no_grad():
            model.lm_head.weight.copy_(original)


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


def test_bad_parameters_are_refused_before_anything_runs(policy: LocalPolicy) -> None:
    with pytest.raises(PalestraError, match="max_new_tokens=0"):
        asyncio.run(policy.sample(policy.open(PROMPT), SamplingParams(max_new_tokens=0)))


def test_weights_of_the_engines_own_module_are_not_copied(model: Qwen3ForCausalLM) -> None:
    def read() -> dict[str, torch.Tensor]:
        raise AssertionError("nothing needs reading")

    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    policy.update(Weights(3, read, model))
    assert policy.version == 3
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def test_named_tensors_are_copied_into_the_module(model: Qwen3ForCausalLM) -> None:
    own = copy.deepcopy(model)
    policy = LocalPolicy(own, kv_memory_gib=0.01, self_check=False)
    head = torch.randn_like(model.lm_head.weight)
    policy.update(Weights(1, lambda: {"lm_head.weight": head}))
    assert torch.equal(own.lm_head.weight, head)
    assert own.lm_head.weight.data_ptr() != head.data_ptr()
    other = dict(model.named_parameters())
    assert all(torch.equal(p, other[name]) for name, p in own.named_parameters() if name != "lm_head.weight")


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"lm_head.weight": torch.zeros(3, 3)}, "lm_head.weight of shape"),
        ({"lora.weight": torch.zeros(3)}, "lora.weight of shape"),
    ],
)
def test_weights_of_another_model_are_refused_and_change_nothing(
    model: Qwen3ForCausalLM, tensors: dict[str, torch.Tensor], complaint: str
) -> None:
    policy = LocalPolicy(model, kv_memory_gib=0.01, self_check=False)
    norm = model.model.norm.weight
    before = norm.clone()
    with pytest.raises(PalestraError, match=complaint):
        policy.update(Weights(1, lambda: {"model.norm.weight": torch.zeros_like(norm), **tensors}))
    assert torch.equal(norm, before)
    assert policy.version == 0
