"""The engine's promises: shared prompts, cached KV, scarce memory, bad input."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from typing import Any

import pytest
from small_engine import BYTES_PER_TOKEN, computed_tokens, sharp_model
from transformers import Qwen3ForCausalLM

from palestra.core.errors import ContextLengthError, PalestraError, StateError
from palestra.core.types import SamplingParams
from palestra.engine.cpu import plan
from palestra.engine.engine import Engine
from palestra.engine.session import Session
from palestra.policy.local import LocalPolicy

VOCABULARY, CONTEXT = 96, 160
PROMPT = [5, 9, 33, 21, 60, 2, 8, 14, 77, 30]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return sharp_model(VOCABULARY, CONTEXT)


def engine_with(model: Any, tokens: int, **options: Any) -> Engine:
    """An engine whose memory holds so many tokens, in pages of 8."""
    return Engine(model, kv_memory_gib=tokens * BYTES_PER_TOKEN / (1 << 30), page_size=8, self_check=False, **options)


def test_prompt_of_a_group_is_computed_once(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.01, self_check=False)
    counts = computed_tokens(engine)
    engine.sample(engine.fork(engine.open(PROMPT), 8), SamplingParams(1))
    assert sum(counts) == len(PROMPT) - 1 + 8


def test_turn_after_a_tool_costs_only_its_new_tokens(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.01, self_check=False)
    session = engine.open(PROMPT)
    engine.sample([session], SamplingParams(6))
    counts = computed_tokens(engine)
    engine.append(session, [1, 2, 3])
    engine.sample([session], SamplingParams(1))
    assert counts == [4]  # the last sampled token and the three new ones


def test_short_tool_results_of_a_step_are_attended_together(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, kv_memory_gib=0.01, self_check=False)
    group = engine.fork(engine.open(PROMPT), 6)
    engine.sample(group, SamplingParams(4))
    for i, session in enumerate(group):
        engine.append(session, [1, 2, 3, 4, 5, 6, 7][: 5 + i % 3])
    calls = []
    attend = plan.attend_part
    monkeypatch.setattr(plan, "attend_part", lambda *args: calls.append(args[0].shape[0]) or attend(*args))
    engine.sample(group, SamplingParams(1))
    layers = model.config.num_hidden_layers
    assert calls == [6, 1] * layers  # all own tokens, then all over the prompt that they share


def test_chunks_are_batched_by_length_and_never_padded_to_a_long_one() -> None:
    counts, own_lens = [1, 1, 1, 8, 10, 12, 13, 60, 80, 90], [40] * 10
    assert [counts[part] for part in plan.batches(counts, own_lens)] == [[1, 1, 1], [8, 10, 12], [13], [60], [80], [90]]
    assert list(plan.batches([20] * 8, [16384] * 8)) == [slice(i, min(i + 3, 8)) for i in range(0, 8, 3)]


def test_text_is_the_same_when_memory_is_scarce(model: Any) -> None:
    def texts(tokens: int) -> list[list[int]]:
        engine = engine_with(model, tokens)
        group = [s for i in range(3) for s in engine.fork(engine.open(PROMPT[i:]), 3)]
        out = []
        for _ in range(3):
            turns = engine.sample(group, [SamplingParams(12, seed=i) for i in range(9)])
            out += [turn.token_ids.tolist() for turn in turns]
            for session in group:
                engine.append(session, [4, 4, 4])
        for session in group:
            engine.close(session)
        assert engine.pool.free == engine.pool.pages
        texts.dropped = engine.scheduler.dropped_sessions  # type: ignore[attr-defined]
        return out

    plenty = texts(10_000)
    assert texts.dropped == 0  # type: ignore[attr-defined]
    scarce = texts(160)
    assert texts.dropped > 0  # type: ignore[attr-defined]
    assert scarce == plenty


def test_rollout_longer_than_the_context_is_truncated(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.01, self_check=False)
    session = engine.open(PROMPT)
    turn = engine.sample([session], SamplingParams(1000))[0]
    assert turn.finish == "length"
    assert len(session.token_ids) == CONTEXT
    assert engine.sample([session], SamplingParams(1))[0].token_ids.tolist() == []


def test_long_prompts_are_prefilled_in_chunks_while_others_decode(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.01, tokens_per_step=16, self_check=False)
    counts = computed_tokens(engine)
    sessions = [engine.open(PROMPT[:2]), engine.open(PROMPT * 9)]
    turns = engine.sample(sessions, SamplingParams(10, temperature=0.0))
    assert max(counts) <= 16
    big = Engine(model, kv_memory_gib=0.01, self_check=False)
    again = big.sample([big.open(PROMPT[:2]), big.open(PROMPT * 9)], SamplingParams(10, temperature=0.0))
    assert [t.token_ids.tolist() for t in turns] == [t.token_ids.tolist() for t in again]


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(32 + i) for i in ids)


def test_stop_string_ends_the_turn_at_the_token_that_completes_it(model: Any) -> None:
    free = Engine(model, kv_memory_gib=0.01, self_check=False)
    text = Letters().decode(list(free.sample([free.open(PROMPT)], SamplingParams(30, seed=1))[0].token_ids), False)
    engine = Engine(model, Letters(), kv_memory_gib=0.01, self_check=False)
    stop = text[9:12]
    turn = engine.sample([engine.open(PROMPT)], SamplingParams(30, seed=1, stop=(stop, "never comes")))[0]
    assert turn.finish == "stop"
    assert Letters().decode(list(turn.token_ids), False) == text[: text.index(stop) + 3]


def test_stop_string_that_never_comes_ends_by_length(model: Any) -> None:
    engine = Engine(model, Letters(), kv_memory_gib=0.01, self_check=False)
    turn = engine.sample([engine.open(PROMPT)], SamplingParams(9, stop=("∞",)))[0]
    assert (turn.finish, len(turn.token_ids)) == ("length", 9)


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda e: e.open([]), "prompt is empty"),
        (lambda e: e.open([1, VOCABULARY]), f"token id {VOCABULARY} is outside"),
        (lambda e: e.open([-1]), "token id -1 is outside"),
        (lambda e: e.open([1] * CONTEXT), f"has {CONTEXT} tokens; the model's context holds {CONTEXT}"),
        (lambda e: e.fork(e.open([1]), 0), "n=0"),
        (lambda e: e.append(e.open([1]), [VOCABULARY + 3]), "outside"),
        (lambda e: e.submit(e.open([1]), SamplingParams(0)), "max_new_tokens=0"),
        (lambda e: e.submit(e.open([1]), SamplingParams(1, temperature=-1)), "temperature=-1"),
        (lambda e: e.submit(e.open([1]), SamplingParams(1, top_p=0)), "top_p=0"),
        (lambda e: e.submit(e.open([1]), SamplingParams(1, stop=("x",))), "need a tokenizer"),
    ],
)
def test_bad_input_is_refused_in_words(model: Any, act: Any, complaint: str) -> None:
    engine = Engine(model, kv_memory_gib=0.01, self_check=False)
    with pytest.raises(PalestraError, match=complaint):
        act(engine)
    assert engine.pool.free == engine.pool.pages


def test_closed_and_busy_sessions_are_refused(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.01, self_check=False)
    session = engine.open(PROMPT)
    job = engine.submit(session, SamplingParams(5))
    with pytest.raises(StateError, match="being sampled"):
        engine.append(session, [1])
    engine.cancel(job)
    assert job.result().finish == "cancelled"
    engine.close(session)
    engine.close(session)
    with pytest.raises(StateError, match="closed"):
        engine.submit(session, SamplingParams(5))


def test_prompt_larger_than_memory_is_refused(model: Any) -> None:
    with pytest.raises(ContextLengthError, match="kv_memory_gib"):
        engine_with(model, 64).open([1] * 70)


async def _one_rollout(policy: LocalPolicy, session: Session, seed: int) -> str:
    luck = random.Random(seed)
    try:
        for turn in range(luck.randint(1, 3)):
            params = SamplingParams(luck.randint(1, 12), seed=seed * 10 + turn, stop_token_ids=(3, 4))
            await policy.sample(session, params)
            await asyncio.sleep(luck.choice([0, 0, 0.001, 0.003]))
            policy.append(session, [luck.randrange(VOCABULARY) for _ in range(luck.randint(0, 6))])
        return "whole"
    finally:
        policy.close(session)


async def _many_rollouts(policy: LocalPolicy, rollouts: int) -> dict[str, int]:
    luck, ends = random.Random(0), {"whole": 0, "cancelled": 0}
    gate = asyncio.Semaphore(100)

    async def group(number: int) -> None:
        async with gate:
            prompt = [luck.randrange(VOCABULARY) for _ in range(luck.randint(1, 40))]
            sessions = policy.fork(policy.open(prompt), 5)
            tasks = [asyncio.create_task(_one_rollout(policy, s, number * 5 + i)) for i, s in enumerate(sessions)]
            for task in tasks:
                if luck.random() < 0.2:
                    await asyncio.sleep(luck.random() * 0.01)
                    task.cancel()
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                ends["whole" if end == "whole" else "cancelled"] += 1
                assert end == "whole" or isinstance(end, asyncio.CancelledError), end
            for session in sessions:
                policy.close(session)  # a task cancelled before its first step closed nothing

    await asyncio.gather(*(group(i) for i in range(rollouts // 5)))
    return ends


def test_rollouts_with_delays_and_cancellations_lose_nothing(model: Any) -> None:
    policy = LocalPolicy(
        model, kv_memory_gib=3000 * BYTES_PER_TOKEN / (1 << 30), page_size=8, max_running=64, self_check=False
    )
    asyncio.run(_many_rollouts(policy, 100))  # buffers reach their size
    tracemalloc.start()
    before = tracemalloc.take_snapshot()
    ends = asyncio.run(_many_rollouts(policy, 300))
    growth = sum(stat.size_diff for stat in tracemalloc.take_snapshot().compare_to(before, "filename"))
    tracemalloc.stop()
    engine = policy.engine
    assert ends["whole"] + ends["cancelled"] == 300
    assert ends["whole"] > 150
    assert ends["cancelled"] > 15
    assert engine.pool.free == engine.pool.pages
    assert not engine.busy
    assert not engine.scheduler.holders
    assert not engine.runner.slots.sessions  # type: ignore[attr-defined]
    assert growth < 1_000_000


def test_rollout_longer_than_memory_is_truncated_and_warned_of_once(model: Any, caplog: Any) -> None:
    engine = engine_with(model, 32)
    assert not caplog.messages
    for _ in range(2):
        [turn] = engine.sample([engine.open(PROMPT)], SamplingParams(100))
        assert turn.finish == "length"
        assert 0 < len(turn.token_ids) < 100
    assert engine.sample([engine.open(PROMPT)], SamplingParams(3))[0].finish == "length"
    [message] = caplog.messages
    assert "model.kv_memory_gib" in message
    assert "32 tokens" in message


def test_rows_stand_in_the_order_of_their_sessions_whichever_tool_answered_first(model: Any) -> None:
    engine = Engine(model, page_size=4, kv_memory_gib=0.01, self_check=False)
    sessions = [engine.open([5, 6, 7 + i]) for i in range(4)]
    jobs = [engine.submit(sessions[i], SamplingParams(2, seed=i)) for i in (2, 0, 3, 1)]
    assert [chunk.job.session for chunk in engine.scheduler.plan()] == sessions
    for job in jobs:
        engine.cancel(job)
