"""Packing groups into batches: exact, whole, oldest first."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.wire.exchange import next_batch
from palestra.wire.journal import Queued


def queue(*groups: tuple[int, int]) -> list[Queued]:
    return [Queued(i, env, size) for i, (env, size) in enumerate(groups, 1)]


def ids(batch: list[Queued] | None) -> list[int] | None:
    return None if batch is None else [group.id for group in batch]


def test_batch_is_exact_and_oldest_first():
    assert ids(next_batch(queue((0, 2), (0, 2), (0, 2)), 4)) == [1, 2]


def test_group_that_does_not_fit_waits_and_does_not_block_the_others():
    assert ids(next_batch(queue((0, 3), (0, 4), (0, 4)), 8)) == [2, 3]


def test_odd_sizes_are_combined_where_greedy_would_fail():
    assert ids(next_batch(queue((0, 3), (0, 2), (0, 2)), 4)) == [2, 3]


def test_too_few_sequences_make_no_batch():
    assert next_batch(queue((0, 4)), 8) is None
    assert next_batch([], 8) is None


def test_environment_with_a_minimum_gets_its_share_though_others_came_first():
    crowd = queue(*[(0, 2)] * 10, (1, 2), (1, 2))
    assert ids(next_batch(crowd, 8, {1: 0.5})) == [1, 2, 11, 12]


def test_batch_waits_for_an_environment_with_a_minimum():
    assert next_batch(queue(*[(0, 2)] * 10), 8, {1: 0.25}) is None


def test_minimum_that_no_exact_sum_meets_is_exceeded_rather_than_waited_for():
    assert ids(next_batch(queue((0, 1), (0, 1), (0, 1), (0, 1), (0, 1), (1, 3)), 8, {1: 0.25})) == [1, 2, 3, 4, 5, 6]


def test_minimums_above_the_whole_batch_are_scaled_down():
    batch = next_batch(queue(*[(0, 1)] * 8, *[(1, 1)] * 8), 8, {0: 1.0, 1: 1.0})
    assert batch is not None
    assert sum(g.env_id == 0 for g in batch) == sum(g.env_id == 1 for g in batch) == 4


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=9),
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 2), st.sampled_from([0.25, 0.5]), max_size=2),
)
def test_a_batch_is_made_exactly_when_one_exists(groups, batch_size, minimums):
    waiting = queue(*groups)
    least = {env: int(batch_size * share) for env, share in minimums.items()}

    def fits(part: tuple[Queued, ...]) -> bool:
        shares = all(sum(g.sequences for g in part if g.env_id == env) >= n for env, n in least.items())
        return sum(g.sequences for g in part) == batch_size and shares

    possible = any(fits(part) for n in range(len(waiting) + 1) for part in itertools.combinations(waiting, n))
    batch = next_batch(waiting, batch_size, minimums)
    assert (batch is not None) == possible
    if batch is not None:
        assert fits(tuple(batch))
        assert [g.id for g in batch] == sorted({g.id for g in batch})
