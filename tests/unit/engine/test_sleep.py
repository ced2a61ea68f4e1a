"""Sleep and wake: the KV cache's memory is free in between, and open sessions go on with the same tokens."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from palestra.core.errors import PalestraError
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.engine.session import Session

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    """Small but for its KV: 16 KiB a token."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=4096)).eval()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def two_turns(engine: Engine, between: Any) -> list[list[int]]:
    """A forked group and a session of its own, two turns each with a tool result and `between` in the middle."""
    group = [*engine.fork(engine.open([5, 9, 33, 21, 60] * 8), 2), engine.open([7, 3])]
    params = [SamplingParams(20, seed=i) for i in range(3)]
    first = engine.sample(group, params)
    between(engine)
    for session in group:
        engine.append(session, [1, 2, 3])
    second = engine.sample(group, params)
    for session in group:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages
    return [turn.token_ids.tolist() for turn in (*first, *second)]


def nap(engine: Engine) -> None:
    engine.sleep()
    engine.sleep()
    engine.wake()
    engine.wake()


def test_open_sessions_give_the_same_tokens_after_a_sleep(model: Any) -> None:
    expected = two_turns(Engine(model, kv_memory_gib=0.1, self_check=False), lambda engine: None)
    assert two_turns(Engine(model, kv_memory_gib=0.1, self_check=False), nap) == expected


def test_a_turn_under_way_goes_on_after_a_sleep(model: Any) -> None:
    def turn(sleeps: bool) -> tuple[list[int], list[int]]:
        engine = Engine(model, kv_memory_gib=0.1, self_check=False)
        job = engine.submit(engine.open([5, 9, 33]), SamplingParams(12, seed=4))
        while len(job.logprobs) < 5:
            engine.step()
        if sleeps:
            nap(engine)
        while job.finish is None:
            engine.step()
        return job.result().token_ids.tolist(), job.result().versions.tolist()

    assert turn(sleeps=True) == turn(sleeps=False)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident size from /proc")
def test_sleep_gives_the_memory_back_to_the_operating_system(model: Any) -> None:
    engine = Engine(model, kv_memory_gib=0.25)
    gc.collect()
    before = resident_bytes()
    sessions = [engine.open([i % 96] * 2500) for i in range(2)]  # 40 MiB of KV each, in pages and in slots
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
    with pytest.raises(PalestraError, match="wake"):
        engine.step()
    engine.wake()
    while job.finish is None:
        engine.step()
    engine.sleep()
    engine.close(session)
    assert engine.pool.free == engine.pool.pages
