"""Recurrent layers in the engine: states are forked, branched, shared between prompts, evicted and computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_families import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import ACTIONS, PAGE, computed_tokens, own_logprobs, play

from palestra.core.types import SamplingParams
from palestra.engine.engine import MIN_STATE_SLOTS, Engine
from palestra.engine.recurrent import CALL_TOKENS, RecurrentLayer, pieces_of, state_bytes
from palestra.engine.runner import GIB
from palestra.engine.supported import kv_shape

PROMPT = [5, 9, 33, 21, 60, 2, 8, 14, 7, 30, 41, 3]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: tiny_model(family) for family in ("lfm2", "qwen3_5_text", "nemotron_h")}


def recurrent_engine(model: Any, **options: Any) -> Engine:
    options = {"kv_memory_gib": 0.01} | options
    return Engine(model, page_size=PAGE, self_check=False, **options)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "nemotron_h"])
def test_a_branch_computes_again_from_the_nearest_state_only(models: dict[str, Any], family: str) -> None:
    engine = recurrent_engine(models[family])
    session = engine.open(PROMPT)
    engine.sample([session], SamplingParams(6, seed=1))
    at_the_end, at_the_start, inside = (engine.branch(session, n) for n in (18, 12, 15))
    assert [s.kv_len for s in (at_the_end, at_the_start, inside)] == [17, 11, 11]
    for branch in (at_the_end, at_the_start, inside):
        engine.append(branch, [1, 2, 3])
        start = len(branch.token_ids)
        counts = computed_tokens(engine)
        [turn] = engine.sample([branch], SamplingParams(5, seed=2))
        assert sum(counts) == start - branch.shared_len + 4
        expected = own_logprobs(models[family], branch.token_ids, start)
        assert turn.logprobs == pytest.approx(expected, abs=1e-5)


def test_prompts_that_begin_alike_share_the_state_where_they_part(models: dict[str, Any]) -> None:
    engine = recurrent_engine(models["lfm2"])
    common = [(7 * i) % 128 for i in range(70)]
    groups = [engine.fork(engine.open([*common, 100 + i, 3, 4]), 2) for i in range(3)]
    counts = computed_tokens(engine)
    turns = engine.sample([s for group in groups for s in group], SamplingParams(2, seed=3))
    first, rest = 72, 2 * (72 - 68)  # whole pages of the common prompt are computed once
    assert sum(counts) == first + rest + 6 * 2
    for session, turn in zip([s for group in groups for s in group], turns, strict=True):
        assert turn.logprobs == pytest.approx(own_logprobs(models["lfm2"], session.token_ids, 73), abs=1e-5)


def test_a_closed_conversation_is_continued_from_its_last_state(models: dict[str, Any]) -> None:
    engine = recurrent_engine(models["qwen3_5_text"], keep_closed=True)
    session = engine.open(PROMPT)
    engine.sample([session], SamplingParams(6, seed=1))
    ids = list(session.token_ids)
    engine.close(session)
    again = engine.open([*ids, 9, 9, 9])
    counts = computed_tokens(engine)
    [turn] = engine.sample([again], SamplingParams(2, seed=1))
    assert sum(counts) == 1 + 3 + 1
    assert turn.logprobs == pytest.approx(own_logprobs(models["qwen3_5_text"], again.token_ids, len(ids) + 3), abs=1e-5)


def test_tokens_that_were_computed_past_the_end_of_a_turn_are_taken_back(models: dict[str, Any]) -> None:
    """On a GPU several tokens are sampled before the host sees a stop string."""
    engine = recurrent_engine(models["qwen3_5_text"])
    session = engine.open(PROMPT)
    engine.sample([session], SamplingParams(6, seed=1))
    job = engine.submit(session, SamplingParams(4, seed=2))
    engine.step()
    engine.step()
    del session.token_ids[-1:]
    engine.cancel(job)
    assert session.state < 0
    engine.append(session, [50, 51])
    start = len(session.token_ids)
    [turn] = engine.sample([session], SamplingParams(4, seed=3))
    assert turn.logprobs == pytest.approx(own_logprobs(models["qwen3_5_text"], session.token_ids, start), abs=1e-5)


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=80))
def test_calls_over_rows_compute_each_token_once_and_in_order(lengths: list[int]) -> None:
    done = np.zeros(len(lengths), np.int64)
    pieces = pieces_of(lengths)
    for rows, firsts, tokens in pieces:
        assert (done[rows] == firsts).all()
        assert tokens > 1 or not firsts.any()
        done[rows] += tokens
    assert done.tolist() == lengths
    whole = [(CALL_TOKENS + tokens) for tokens in set(lengths)]
    assert sum(CALL_TOKENS + piece.tokens for piece in pieces) <= sum(whole)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "nemotron_h"])
def test_rows_of_many_lengths_take_few_calls_and_give_the_models_own_logprobs(
    family: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, calls = range(20, 36), []
    own = RecurrentLayer.__call__

    def counted(layer: RecurrentLayer, rows: Any, states: Any) -> Any:
        calls.append(layer.number)
        return own(layer, rows, states)

    monkeypatch.setattr(RecurrentLayer, "__call__", counted)
    engine = recurrent_engine(models[family])
    sessions = [engine.open([(3 * i + n) % 128 for i in range(n)]) for n in lengths]
    for appended in (0, 1):
        calls.clear()
        for n, session in zip(lengths, sessions, strict=True):
            engine.append(session, [n] * (n - 17) * appended)
        starts = [len(session.token_ids) for session in sessions]
        turns = engine.sample(sessions, SamplingParams(1, seed=4))
        assert calls.count(0) < 8
        for session, start, turn in zip(sessions, starts, turns, strict=True):
            assert turn.logprobs == pytest.approx(own_logprobs(models[family], session.token_ids, start), abs=1e-5)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, tokens=st.sampled_from([96, 10_000]), family=st.sampled_from(["lfm2", "qwen3_5_text"]))
def test_whatever_is_opened_forked_branched_and_closed_logprobs_are_the_models_own(
    models: dict[str, Any], actions: list[tuple[str, int]], tokens: int, family: str
) -> None:
    """With much memory and with little, where states are evicted."""
    shape = kv_shape(models[family])
    memory = MIN_STATE_SLOTS * state_bytes(shape.states) + tokens * shape.bytes_per_token
    engine = recurrent_engine(models[family], kv_memory_gib=memory / GIB)
    slots = engine.scheduler.states
    assert slots is not None
    free = slots.free
    play(engine, models[family], actions)
    assert slots.free == free
