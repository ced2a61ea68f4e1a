"""Branches: sessions that go on from the middle of another one, and compute nothing of its beginning again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_engine import ACTIONS, PAGE, computed_tokens, engine_of, own_logprobs, play, sharp_model
from transformers import Qwen3ForCausalLM

from palestra.core.errors import SettingError, StateError
from palestra.core.types import SamplingParams

VOCABULARY = 64
PROMPT = [5, 9, 33, 21, 60, 2, 8, 14, 7, 30]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return sharp_model(VOCABULARY, 256)


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 10, 13, 16])
def test_a_branch_samples_what_a_fresh_session_does_and_computes_only_what_is_new(model: Any, length: int) -> None:
    engine = engine_of(model)
    session = engine.open(PROMPT)
    engine.sample([session], SamplingParams(6, seed=1))
    before = list(session.token_ids)
    branch = engine.branch(session, length)
    assert branch.token_ids == before[:length]
    engine.append(branch, [1, 2, 3])
    counts = computed_tokens(engine)
    [turn] = engine.sample([branch], SamplingParams(5, seed=2))
    assert counts[0] == 4  # the last shared token, from which the next is computed, and three new ones
    [fresh] = engine.sample([engine.open([*before[:length], 1, 2, 3])], SamplingParams(5, seed=2))
    assert turn.token_ids.tolist() == fresh.token_ids.tolist()
    assert turn.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
    assert session.token_ids == before
    [more] = engine.sample([session], SamplingParams(5, seed=3))
    assert more.logprobs == pytest.approx(own_logprobs(model, session.token_ids, len(before)), abs=1e-4)


def test_a_branch_of_a_fork_that_has_not_run_shares_its_source(model: Any) -> None:
    engine = engine_of(model)
    first, second = engine.fork(engine.open(PROMPT), 2)
    engine.sample([first], SamplingParams(2, seed=1))
    branch = engine.branch(second, 8)
    counts = computed_tokens(engine)
    engine.sample([branch], SamplingParams(1))
    assert counts == [1]


def test_new_weights_make_the_kv_of_a_branch_stale(model: Any) -> None:
    engine = engine_of(model)
    session = engine.open(PROMPT)
    engine.sample([session], SamplingParams(2))
    branch = engine.branch(session, 8)
    assert branch.kv_len == 7
    engine.weights_changed(1)
    assert branch.kv_len == session.kv_len == 0
    assert engine.pool.free == engine.pool.pages
    counts = computed_tokens(engine)
    engine.sample([branch], SamplingParams(1))
    assert counts == [8]


def test_without_a_free_page_only_whole_pages_are_shared(model: Any) -> None:
    engine = engine_of(model, tokens=12)
    session = engine.open(PROMPT)
    job = engine.submit(session, SamplingParams(2))
    engine.step()
    assert engine.pool.free == 0
    assert engine.branch(session, 8).kv_len == PAGE
    engine.cancel(job)
    assert engine.branch(session, 8).kv_len == PAGE


@pytest.mark.parametrize("length", [0, 11])
def test_a_length_that_the_session_does_not_have_is_refused(model: Any, length: int) -> None:
    engine = engine_of(model)
    session = engine.open(PROMPT)
    with pytest.raises(SettingError, match="expected 1 to 10"):
        engine.branch(session, length)
    engine.close(session)
    with pytest.raises(StateError, match="closed"):
        engine.branch(session, 4)


def test_on_a_gpu_a_page_is_copied_after_the_copy_that_fills_it(model: Any) -> None:
    """A branch of a branch, before any step: copies wait for the next step, where all are made at once."""
    pytest.importorskip("triton")
    from palestra.engine.cuda.runner import CudaRunner
    from palestra.engine.supported import kv_shape

    runner = CudaRunner(model, kv_shape(model), 4, PAGE, 4, 64)
    runner.keys[:, 0] = 1.0
    runner.copy_page(0, 1)
    runner.copy_page(1, 2)
    runner._copy_pages()
    assert (runner.keys[:, 2] == 1.0).all()


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, tokens=st.sampled_from([96, 10_000]))
def test_whatever_is_opened_forked_branched_and_closed_logprobs_are_the_models_own(
    model: Any, actions: list[tuple[str, int]], tokens: int
) -> None:
    """With much memory and with little, where KV is dropped and computed again."""
    play(engine_of(model, tokens), model, actions)
