"""CUDA out of memory while sampling: half of the KV cache, the same tokens, one warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.engine.supported import CacheTooLarge


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=512)).eval()


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
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sample(Engine(model, kv_memory_gib=0.001, self_check=False))
    engine = Engine(model, kv_memory_gib=0.001, self_check=False)
    pages = engine.pool.pages
    fails_at(engine, 2, 6, 7)
    with caplog.at_level(logging.WARNING):
        assert sample(engine) == expected
    assert engine.pool.pages == pages // 2 // 2 // 2
    [warning] = [r.getMessage() for r in caplog.records]
    assert f"room for {pages // 2 * 16} tokens from now on instead of {pages * 16}" in warning


def test_a_cache_that_would_not_hold_a_rollout_any_more_is_an_error_with_its_remedy(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.001, self_check=False)
    fails_at(engine, *range(100))
    with pytest.raises(PalestraError, match=r"does not hold a rollout of 4\d; lower rollout.max_new_tokens"):
        sample(engine)


def test_waking_up_takes_what_memory_there_is(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.001, self_check=False)
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
