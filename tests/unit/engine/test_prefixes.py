"""Prompts that begin alike: their common pages are computed once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from small_engine import BYTES_PER_TOKEN, computed_tokens, sharp_model
from transformers import Qwen3ForCausalLM

from palestra.core.types import SamplingParams, Turn
from palestra.engine.engine import Engine
from palestra.engine.session import Session

VOCABULARY, PAGE = 64, 16
INSTRUCTIONS = [(7 * i + 3) % VOCABULARY for i in range(70)]  # four pages and a part
PROMPTS = [[*INSTRUCTIONS, 1 + i, 2 + i, 3 + i] for i in range(5)]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return sharp_model(VOCABULARY, 256)


def engine_of(model: Any, tokens: int = 10_000, **options: Any) -> Engine:
    memory = tokens * BYTES_PER_TOKEN / (1 << 30)
    return Engine(model, page_size=PAGE, kv_memory_gib=memory, self_check=False, **options)


def groups_of(engine: Engine, prompts: list[list[int]]) -> list[Session]:
    return [fork for prompt in prompts for fork in engine.fork(engine.open(prompt), 2)]


def seeds(count: int) -> list[SamplingParams]:
    return [SamplingParams(6, seed=seed) for seed in range(count)]


def sampled_alone(model: Any) -> list[Turn]:
    """Each group in an engine of its own."""
    params = seeds(2 * len(PROMPTS))
    pairs = [params[2 * i : 2 * i + 2] for i in range(len(PROMPTS))]
    engines = [engine_of(model) for _ in PROMPTS]
    return [
        turn
        for engine, prompt, pair in zip(engines, PROMPTS, pairs, strict=True)
        for turn in engine.sample(groups_of(engine, [prompt]), pair)
    ]


def assert_same(turns: list[Turn], expected: list[Turn]) -> None:
    for turn, other in zip(turns, expected, strict=True):
        assert turn.token_ids.tolist() == other.token_ids.tolist()
        assert turn.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_groups_that_start_together_compute_their_common_pages_once(model: Any) -> None:
    engine = engine_of(model)
    counts = computed_tokens(engine)
    turns = engine.sample(groups_of(engine, PROMPTS), seeds(10))
    prompt, common = len(PROMPTS[0]) - 1, 4 * PAGE
    assert counts[0] == prompt
    assert counts[1] == 4 * (prompt - common) + 2  # what the others have of their own, beside the first two forks
    assert sum(counts) == prompt + 4 * (prompt - common) + 10 * 6
    assert_same(turns, sampled_alone(model))


def test_a_group_that_comes_later_shares_with_one_that_still_runs(model: Any) -> None:
    engine = engine_of(model)
    first = [
        engine.submit(session, params) for session, params in zip(groups_of(engine, PROMPTS[:1]), seeds(2), strict=True)
    ]
    engine.step()
    engine.step()
    counts = computed_tokens(engine)
    engine.sample(groups_of(engine, PROMPTS[1:2]), SamplingParams(1))
    assert counts[0] == 2 + len(PROMPTS[1]) - 1 - 4 * PAGE  # beside the two that decode
    assert all(len(job.logprobs) > 1 for job in first)


def test_short_common_beginnings_are_not_waited_for(model: Any) -> None:
    engine = engine_of(model)
    counts = computed_tokens(engine)
    engine.sample(groups_of(engine, [prompt[40:] for prompt in PROMPTS]), SamplingParams(1))
    assert counts[0] == 5 * (len(PROMPTS[0]) - 41)


def test_pages_of_older_weights_are_not_shared(model: Any) -> None:
    engine = engine_of(model)
    before = groups_of(engine, PROMPTS[:1])
    engine.sample(before, SamplingParams(1))
    engine.weights_changed(1)
    counts = computed_tokens(engine)
    engine.sample(groups_of(engine, PROMPTS[1:2]), SamplingParams(1))
    assert counts[0] == len(PROMPTS[1]) - 1


def test_closed_groups_give_all_their_pages_back(model: Any) -> None:
    engine = engine_of(model)
    sessions = groups_of(engine, PROMPTS)
    engine.sample(sessions, SamplingParams(1))
    for session in sessions:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages
    counts = computed_tokens(engine)
    engine.sample(groups_of(engine, PROMPTS[:1]), SamplingParams(1))
    assert counts[0] == len(PROMPTS[0]) - 1


@pytest.mark.parametrize("pages", [7, 9, 12, 20])
def test_scarce_memory_changes_no_token(model: Any, pages: int) -> None:
    engine = engine_of(model, pages * PAGE)
    assert_same(engine.sample(groups_of(engine, PROMPTS), seeds(10)), sampled_alone(model))


def turn_of(engine: Engine, prompt: list[int], new: int = 6) -> Turn:
    """One request, as a server answers it: opened, sampled, closed."""
    session = engine.open(prompt)
    [turn] = engine.sample([session], SamplingParams(new, seed=5))
    engine.close(session)
    return turn


def test_the_next_turn_of_a_closed_conversation_computes_what_is_new(model: Any) -> None:
    engine = engine_of(model, keep_closed=True)
    first = turn_of(engine, INSTRUCTIONS)
    history = [*INSTRUCTIONS, *first.token_ids.tolist(), 9, 8, 7]
    counts = computed_tokens(engine)
    second = turn_of(engine, history)
    kept = (len(INSTRUCTIONS) + 5) // PAGE * PAGE
    assert counts[0] == len(history) - kept
    assert_same([first, second], [turn_of(engine_of(model), prompt) for prompt in (INSTRUCTIONS, history)])


def test_what_closed_conversations_left_makes_room_for_new_ones(model: Any) -> None:
    engine = engine_of(model, 8 * PAGE, keep_closed=True)
    for start in range(20):
        prompt = [(start + 5 * i) % VOCABULARY for i in range(5 * PAGE)]
        assert_same([turn_of(engine, prompt)], [turn_of(engine_of(model), prompt)])
    assert engine.pool.free + len({p for s in engine.scheduler.holders for p in s.table}) == engine.pool.pages


def test_new_weights_forget_what_closed_conversations_left(model: Any) -> None:
    engine = engine_of(model, keep_closed=True)
    turn_of(engine, INSTRUCTIONS)
    assert engine.pool.free < engine.pool.pages
    engine.weights_changed(1)
    assert engine.pool.free == engine.pool.pages
    counts = computed_tokens(engine)
    turn_of(engine, INSTRUCTIONS)
    assert counts[0] == len(INSTRUCTIONS)


def test_the_same_request_again_and_again_is_kept_once(model: Any) -> None:
    engine = engine_of(model, keep_closed=True)
    for _ in range(5):
        turn_of(engine, INSTRUCTIONS)
    assert engine.pool.pages - engine.pool.free == (len(INSTRUCTIONS) + 5) // PAGE
    assert len(engine.scheduler.holders) == 1


def test_no_more_closed_conversations_are_kept_than_allowed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.engine.scheduler.MAX_KEPT", 3)
    engine = engine_of(model, keep_closed=True)
    for start in range(6):
        turn_of(engine, [(start + 3 * i) % VOCABULARY for i in range(40)])
    assert len(engine.scheduler.holders) == 3


def test_forks_leave_their_common_beginning_and_what_each_said(model: Any) -> None:
    engine = engine_of(model, keep_closed=True)
    forks = engine.fork(engine.open(INSTRUCTIONS), 2)
    engine.sample(forks, [SamplingParams(20, seed=seed) for seed in (1, 2)])
    tokens = [list(fork.token_ids) for fork in forks]
    for fork in forks:
        engine.close(fork)
    counts = computed_tokens(engine)
    turn_of(engine, [*tokens[0], 3])
    assert counts[0] == len(tokens[0]) + 1 - (len(tokens[0]) - 1) // PAGE * PAGE
