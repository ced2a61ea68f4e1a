"""Packing groups into batches: exact, whole, oldest first."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.sources.wire.exchange import next_batch
from palestra.sources.wire.journal import Queued


def queue(*groups: tuple[int, int]) -> list[Queued]:
    return [Queued(i, env, size) for i, (env, size) in enumerate(groups, 1)]


@pytest.mark.parametrize(
    ("groups", "batch_size", "minimums", "expected"),
    [
        ([(0, 2)] * 3, 4, {}, [1, 2]),
        ([(0, 3), (0, 4), (0, 4)], 8, {}, [2, 3]),
        ([(0, 3), (0, 2), (0, 2)], 4, {}, [2, 3]),
        ([(0, 4)], 8, {}, None),
        ([], 8, {}, None),
        ([(0, 2)] * 10 + [(1, 2)] * 2, 8, {1: 0.5}, [1, 2, 11, 12]),
        ([(0, 2)] * 10, 8, {1: 0.25}, None),
        ([(0, 1)] * 5 + [(1, 3)], 8, {1: 0.25}, [1, 2, 3, 4, 5, 6]),
        ([(0, 1)] * 8 + [(1, 1)] * 8, 8, {0: 1.0, 1: 1.0}, [1, 2, 3, 4, 9, 10, 11, 12]),
    ],
    ids=[
        "exact and oldest first", "one that does not fit waits", "where greedy fails", "too few", "none",
        "a minimum though others came first", "waits for a minimum", "a minimum is exceeded",
        "minimums are scaled down",
    ],
)  # fmt: skip
def test_the_next_batch(groups, batch_size, minimums, expected):
    batch = next_batch(queue(*groups), batch_size, minimums)
    assert (batch and [group.id for group in batch]) == expected


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
