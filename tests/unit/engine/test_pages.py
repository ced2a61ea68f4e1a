"""The page pool: no page is lost, and none has two owners by mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.engine.pages import PagePool


def test_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    pool = PagePool(pages=8, page_size=4)
    table = pool.take(3)  # 10 tokens: two full pages, one with 2
    fork = pool.fork(table, length=10)
    assert fork.table[:2] == table[:2]
    assert fork.copy == (table[2], fork.table[2])
    pool.release(table)
    assert pool.free == 8 - 3  # the fork still holds all three of its own
    pool.release(fork.table)
    assert pool.free == 8


def test_fork_at_a_page_boundary_copies_nothing() -> None:
    pool = PagePool(pages=4, page_size=4)
    table = pool.take(2)
    fork = pool.fork(table, length=8)
    assert fork.copy is None
    assert pool.free == 2


def test_more_pages_than_free_are_refused() -> None:
    pool = PagePool(pages=2, page_size=4)
    pool.take(2)
    with pytest.raises(MemoryError, match="1 pages asked for"):
        pool.take(1)


def test_page_released_twice_is_an_error() -> None:
    pool = PagePool(pages=2, page_size=4)
    table = pool.take(1)
    pool.release(table)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(table)


@given(st.lists(st.tuples(st.sampled_from(["take", "fork", "release"]), st.integers(0, 40)), max_size=60))
def test_every_page_comes_back_whatever_the_order(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(pages=32, page_size=4)
    held: list[tuple[list[int], int]] = []
    for action, number in actions:
        if action == "take" and pool.needed(number) <= pool.free:
            held.append((pool.take(pool.needed(number)), number))
        elif action == "fork" and held and pool.free:
            table, length = held[number % len(held)]
            held.append((pool.fork(table, length).table, length))
        elif action == "release" and held:
            pool.release(held.pop(number % len(held))[0])
    distinct = {page for table, _ in held for page in table}
    assert pool.free == 32 - len(distinct)
    for table, _ in held:
        pool.release(table)
    assert pool.free == 32
