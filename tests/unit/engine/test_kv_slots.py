"""Slots of contiguous KV on the CPU: a session keeps its slot between its turns, as long as nobody else needs it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engine import PAGE, computed_tokens, engine_of, own_logprobs, sharp_model
from transformers import Qwen3ForCausalLM

from palestra.core.types import SamplingParams
from palestra.engine.cpu import plan
from palestra.engine.cpu.kv_slots import KVSlots, Pages, SlotBuffer
from palestra.engine.engine import Engine
from palestra.engine.session import Session
from palestra.engine.supported import KVShape

VOCABULARY, ROWS = 64, 8  # rows of a buffer that has not grown
PROMPTS = [[5, 9, 33, 21, 60, 2, 8, 14, 7, 30], [7, 3, 12, 40, 41, 42]]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return sharp_model(VOCABULARY, 256)


def slots_of(engine: Engine) -> KVSlots:
    slots = engine.runner.slots  # type: ignore[attr-defined]
    assert isinstance(slots, KVSlots)
    return slots


def occupied(engine: Engine) -> list[int]:
    return [row for row, slot in enumerate(slots_of(engine)._slots) if slot is not None]


def group_and_single(engine: Engine) -> list[Session]:
    return [*engine.fork(engine.open(PROMPTS[0]), 3), engine.open(PROMPTS[1])]


def turns(engine: Engine, sessions: Iterable[Session], lengths: Iterable[int], seed: int = 0) -> list[list[float]]:
    jobs = [
        engine.submit(session, SamplingParams(length, seed=seed + i))
        for i, (session, length) in enumerate(zip(sessions, lengths, strict=True))
    ]
    while any(job.finish is None for job in jobs):
        engine.step()
    return [job.logprobs for job in jobs]


def assert_right(model: Any, session: Session, sampled: list[float]) -> None:
    start = len(session.token_ids) - len(sampled)
    assert sampled == pytest.approx(own_logprobs(model, session.token_ids, start), abs=1e-4)


def assert_turns_right(model: Any, engine: Engine, sessions: Sequence[Session], lengths: Sequence[int]) -> None:
    for session, sampled in zip(sessions, turns(engine, sessions, lengths), strict=True):
        assert_right(model, session, sampled)


def count_calls(patch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The names of the methods of Pages that are called from here on."""
    calls: list[str] = []

    def counted(name: str, method: Any) -> Any:
        return lambda *args: calls.append(name) or method(*args)

    for name in names:
        patch.setattr(Pages, name, counted(name, getattr(Pages, name)))
    return calls


def test_kv_stays_in_its_slot_between_turns(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    sessions = group_and_single(engine)
    turns(engine, sessions, (3, 9, 1, 5))
    calls, counts = count_calls(monkeypatch, "read", "write"), computed_tokens(engine)
    for session in sessions:
        engine.append(session, [1, 2])
    assert_turns_right(model, engine, sessions, (4, 1, 6, 2))
    assert counts[0] == 4 * 3
    for session in sessions:
        engine.close(session)
    assert calls == []
    assert occupied(engine) == []


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_leave_and_come_back_in_any_order_go_on_from_their_own_kv(model: Any, seed: int) -> None:
    luck = random.Random(seed)
    engine = engine_of(model)
    sessions = [*group_and_single(engine), *engine.fork(engine.open(PROMPTS[1]), 5), engine.open(PROMPTS[0][3:])]
    jobs: dict[Session, Any] = {}
    for _ in range(60):
        for session in luck.sample(sessions, len(sessions)):
            job = jobs.get(session)
            if job is not None and job.finish is not None:
                assert_right(model, session, jobs.pop(session).logprobs)
            if session not in jobs and luck.random() < 0.4:
                engine.append(session, [luck.randrange(VOCABULARY) for _ in range(luck.randrange(4))])
                jobs[session] = engine.submit(session, SamplingParams(luck.randint(1, 4), seed=luck.randrange(100)))
        if luck.random() < 0.3:
            gone = sessions.pop(luck.randrange(len(sessions)))
            engine.close(gone)
            jobs.pop(gone, None)
            sessions.append(engine.open(PROMPTS[luck.randrange(2)][: luck.randint(1, 6)]))
        engine.step()
    for session in sessions:
        engine.close(session)
    assert occupied(engine) == []
    assert slots_of(engine)._prefixes == []
    assert engine.pool.free == engine.pool.pages


def test_the_buffer_does_not_grow_for_idle_sessions(model: Any) -> None:
    engine = engine_of(model)
    early = [engine.open([5, 6, 7 + i]) for i in range(ROWS)]
    turns(engine, early, range(2, 2 + ROWS))  # so that they leave one after the other
    assert all(session.slot >= 0 for session in early)
    late = [engine.open([9, 3, 2 + i]) for i in range(3)]
    turns(engine, late, (3, 3, 3))
    assert [session.slot < 0 for session in early] == [True] * 3 + [False] * 5, "who was idle for the longest time"
    assert slots_of(engine).own.rows == ROWS
    counts = computed_tokens(engine)
    assert_turns_right(model, engine, early, [4] * ROWS)
    assert counts[0] == ROWS, "nothing was computed again"


def test_a_branch_of_an_idle_session_shares_what_only_its_slot_held(model: Any) -> None:
    engine = engine_of(model)
    sessions = group_and_single(engine)
    turns(engine, sessions, (6, 6, 6, 6))
    for session in sessions:
        length = len(session.token_ids)
        branch = engine.branch(session, length)
        assert branch.kv_len == length - 1
        assert session.slot >= 0
        assert_turns_right(model, engine, (session, branch), (5, 3))


def test_forks_of_an_idle_session_share_what_only_its_slot_held(model: Any) -> None:
    engine = engine_of(model)
    [session] = sessions = [engine.open(PROMPTS[0])]
    turns(engine, sessions, [7])
    counts = computed_tokens(engine)
    forks = engine.fork(session, 3)
    assert_turns_right(model, engine, forks, (2, 4, 3))
    assert counts[0] == 3
    for fork in forks:
        engine.close(fork)
    assert occupied(engine) == []


def test_a_conversation_whose_last_turn_was_in_a_slot_is_kept_when_it_is_closed(model: Any) -> None:
    engine = engine_of(model, keep_closed=True)
    session = engine.open(PROMPTS[0])
    turns(engine, [session], [9])
    said = list(session.token_ids)
    engine.close(session)
    assert occupied(engine) == []
    following = engine.open([*said, 1])
    counts = computed_tokens(engine)
    assert_right(model, following, turns(engine, [following], [4])[0])
    assert counts[0] == len(said) + 1 - (len(said) - 1) // PAGE * PAGE


def test_a_prompt_that_begins_like_one_being_sampled_shares_its_pages(model: Any) -> None:
    engine = engine_of(model)
    first = engine.open([*PROMPTS[0], *PROMPTS[1]])
    job = engine.submit(first, SamplingParams(12, seed=1))
    for _ in range(6):
        engine.step()
    second = engine.open([*PROMPTS[0], 1, 2, 3])
    counts = computed_tokens(engine)
    assert_right(model, second, turns(engine, [second], [4])[0])
    assert counts[0] == 1 + len(PROMPTS[0]) % PAGE + 3, "a token of the first, and what is not in a whole page"
    while job.finish is None:
        engine.step()
    assert_right(model, first, job.logprobs)


def test_new_weights_empty_the_slots_of_idle_sessions(model: Any) -> None:
    engine = engine_of(model)
    sessions = group_and_single(engine)
    turns(engine, sessions, (3, 9, 1, 5))
    engine.weights_changed(1)
    assert occupied(engine) == []
    counts = computed_tokens(engine)
    assert_turns_right(model, engine, sessions, (4, 1, 6, 2))
    assert counts[0] > 4


def test_idle_sessions_whose_pages_are_needed_lose_their_slots(model: Any) -> None:
    engine = engine_of(model, tokens=48)
    first, second = engine.open(PROMPTS[0]), engine.open(PROMPTS[1])
    turns(engine, [first], [10])
    assert first.slot >= 0
    turns(engine, [second], [30])
    assert (first.slot, first.kv_len, first.table) == (-1, 0, [])
    assert_right(model, first, turns(engine, [first], [3])[0])


def test_the_order_of_rows_does_not_depend_on_when_idle_sessions_are_closed(model: Any) -> None:
    """It decides the last bits of a product, so that one seed would give several trainings."""

    def sampled(close_at: int) -> list[list[float]]:
        engine = engine_of(model)
        sessions = [*engine.fork(engine.open(PROMPTS[0]), 5), *(engine.open([5, i, 7]) for i in range(4))]
        turns(engine, sessions, (3, 9, 1, 5, 4, 2, 8, 6, 7))
        jobs = [engine.submit(s, SamplingParams(6 + i, seed=i)) for i, s in enumerate(sessions[::2])]
        for step in range(9):
            if step == close_at:
                for session in sessions[1::2]:
                    engine.close(session)
            if step == 3:
                late = engine.fork(engine.open(PROMPTS[1]), 3)
                jobs += [engine.submit(s, SamplingParams(5, seed=i)) for i, s in enumerate(late)]
            engine.step()
        while any(job.finish is None for job in jobs):
            engine.step()
        return [job.logprobs for job in jobs]

    expected = sampled(close_at=0)
    for step in (2, 4, 8):
        assert sampled(step) == expected


def test_an_only_fork_attends_to_its_prompt_and_its_own_tokens_in_one_call(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    [fork] = forks = engine.fork(engine.open(PROMPTS[0]), 1)
    turns(engine, forks, [3])
    engine.append(fork, [1, 2])
    attend, calls = plan.attend_part, []
    monkeypatch.setattr(plan, "attend_part", lambda *args: calls.append(args[1].shape[2]) or attend(*args))
    assert_right(model, fork, turns(engine, forks, [2])[0])
    layers = model.config.num_hidden_layers
    assert calls == [len(fork.token_ids) - 2] * layers + [len(fork.token_ids) - 1] * layers


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.permutations(range(6)), st.sets(st.integers(0, 5), min_size=1))
def test_rows_move_in_circles_and_into_free_rows(order: list[int], targets: set[int]) -> None:
    buffer = SlotBuffer(KVShape(layers=1, heads=1, key_dim=2, value_dim=3, dtype=torch.float32))
    for row in range(6):
        buffer.keys[:, row], buffer.values[:, row] = row, row
    buffer.move({target: (order[target], 1 + order[target]) for target in targets if target != order[target]})
    for row in range(6):
        expected = order[row] if row in targets else row
        for store in (buffer.keys, buffer.values):
            assert (store[:, row, :, : 1 + expected] == expected).all()
            assert (store[:, row, :, 1 + expected :] == row).all()
