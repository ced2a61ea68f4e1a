"""Memory: sleep gives it back, and a GPU without enough of it gets a smaller cache."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_engine import small_model
from transformers import Qwen3ForCausalLM

from palestra.core.errors import ResourceError, StateError
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.engine.session import Session
from palestra.engine.supported import CacheTooLarge

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """Small but for its KV: 16 KiB a token."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    return small_model(context=4096, num_hidden_layers=4, **heads)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_turn_under_way_goes_on_after_a_sleep(model: Any) -> None:
    def turn(sleeps: bool) -> tuple[list[int], list[int]]:
        engine = Engine(model, kv_memory_gib=0.1, self_check=False)
        job = engine.submit(engine.open([5, 9, 33]), SamplingParams(12, seed=4))
        while len(job.logprobs) < 5:
            engine.step()
        if sleeps:
            for change in (engine.sleep, engine.sleep, engine.wake, engine.wake):
                change()
        while job.finish is None:
            engine.step()
        return job.result().token_ids.tolist(), job.result().versions.tolist()

    assert turn(sleeps=True) == turn(sleeps=False)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
def test_sleep_gives_the_memory_back_to_the_operating_system(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.25, self_check=False)
    gc.collect()
    before = resident_bytes()
    sessions = [engine.open([i % 96] * 1250) for i in range(4)]  # 20 MiB of KV each, in pages and in slots
    engine.sample(sessions, SamplingParams(2))
    filled = resident_bytes() - before
    engine.sleep()
    left = resident_bytes() - before
    assert filled > 150 * MIB
    assert left < 30 * MIB
    engine.wake()
    assert engine.sample(sessions[:1], SamplingParams(2))[0].finish == "length"


def test_sampling_while_asleep_is_refused_and_closing_is_not(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.1, self_check=False)
    session: Session = engine.open([5, 9])
    engine.sample([session], SamplingParams(2))
    engine.sleep()
    job = engine.submit(session, SamplingParams(2))
    with pytest.raises(StateError, match="wake"):
        engine.step()
    engine.wake()
    while job.finish is None:
        engine.step()
    engine.sleep()
    engine.close(session)
    assert engine.pool.free == engine.pool.pages


@pytest.fixture(scope="module")
def plain_model() -> Any:
    return small_model(context=512)


def sample(engine: Engine) -> list[list[int]]:
    group = [*engine.fork(engine.open([5, 9, 33, 21, 60] * 8), 4), engine.open([7, 3])]
    turns = engine.sample(group, [SamplingParams(20, seed=i) for i in range(5)])
    for session in group:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages
    return [turn.token_ids.tolist() for turn in turns]


def fails_at(engine: Engine, *steps: int) -> None:
    """The runner's memory runs out in these of its steps, after they were computed."""
    step, count = engine.runner.step, 0

    def once(chunks: Any) -> Any:
        nonlocal count
        count += 1
        found = step(chunks)
        if count in steps:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return found

    engine.runner.step = once  # type: ignore[method-assign]


def test_sampling_goes_on_with_half_of_the_cache_and_the_same_tokens(
    plain_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sample(Engine(plain_model, kv_memory_gib=0.001, self_check=False))
    engine = Engine(plain_model, kv_memory_gib=0.001, self_check=False)
    pages = engine.pool.pages
    fails_at(engine, 2, 6, 7)
    with caplog.at_level(logging.WARNING):
        assert sample(engine) == expected
    assert engine.pool.pages == pages // 2 // 2 // 2
    [warning] = [r.getMessage() for r in caplog.records]
    assert f"room for {pages // 2 * 16} tokens from now on instead of {pages * 16}" in warning


def test_a_cache_that_would_not_hold_a_rollout_any_more_is_an_error_with_its_remedy(plain_model: Any) -> None:
    engine = Engine(plain_model, kv_memory_gib=0.001, self_check=False)
    fails_at(engine, *range(100))
    with pytest.raises(ResourceError, match=r"does not hold a rollout of 4\d; lower rollout.max_new_tokens"):
        sample(engine)


def test_waking_up_takes_what_memory_there_is(plain_model: Any) -> None:
    engine = Engine(plain_model, kv_memory_gib=0.001, self_check=False)
    pages, reserve = engine.pool.pages, engine.runner.reserve_memory

    def crowded(count: int) -> None:
        if count > pages // 2:
            raise CacheTooLarge("the KV cache does not fit on the GPU")
        reserve(count)

    engine.runner.reserve_memory = crowded  # type: ignore[method-assign]
    engine.sleep()
    engine.wake()
    assert engine.pool.pages == pages // 2
    assert sample(engine)
