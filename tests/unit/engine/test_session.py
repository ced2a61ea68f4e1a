"""Pages, and rows that share them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.engine.session import BLOCK_ROWS, PagePool, Session, SharedPrefixes


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
    assert pool.fork(pool.take(2), length=8).copy is None  # ends with a page
    assert pool.free == 6


def test_more_pages_than_free_and_a_page_released_twice_are_errors() -> None:
    pool = PagePool(pages=2, page_size=4)
    table = pool.take(2)
    with pytest.raises(MemoryError, match="1 pages asked for"):
        pool.take(1)
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


def siblings(pool: PagePool, count: int, tokens: int) -> list[Session]:
    """Forks of one prompt, with a page of their own behind it."""
    parent = pool.take(pool.needed(tokens))
    forks = [pool.fork(parent, tokens).table + pool.take(1) for _ in range(count)]
    return [Session([0] * (tokens + 2), table=table, kv_len=tokens + 1, shared_len=tokens) for table in forks]


def test_siblings_read_their_whole_pages_together_and_others_read_alone() -> None:
    pool = PagePool(200, 16)
    first, second, alone = siblings(pool, 3, 40), siblings(pool, 2, 70), siblings(pool, 1, 64)
    stranger = Session([0] * 9, table=pool.take(1), kv_len=8)
    rows = [first[0], second[0], stranger, first[1], alone[0], second[1], first[2]]
    shared = SharedPrefixes.of(rows, 16, min_tokens=0)
    assert shared is not None
    assert shared.tokens.tolist() == [32, 64, 0, 32, 0, 64, 32]
    assert [[row for row in block if row >= 0] for block in shared.blocks.tolist()] == [[0, 3, 6], [1, 5]]
    for block in shared.blocks:
        rows_of_block = block[block >= 0]
        pages = {tuple(rows[row].table[: shared.tokens[row] // 16]) for row in rows_of_block}
        assert len(pages) == 1


def test_a_large_group_is_cut_into_blocks_and_a_single_row_left_over_reads_alone() -> None:
    shared = SharedPrefixes.of(siblings(PagePool(200, 16), 2 * BLOCK_ROWS + 1, 16), 16, min_tokens=0)
    assert shared is not None
    assert shared.blocks.tolist() == np.arange(2 * BLOCK_ROWS).reshape(2, BLOCK_ROWS).tolist()
    assert shared.tokens.tolist() == [16] * 2 * BLOCK_ROWS + [0]


def test_what_saves_too_little_is_read_by_each_row() -> None:
    rows = siblings(PagePool(200, 16), 4, 32)
    assert SharedPrefixes.of(rows, 16, min_tokens=97) is None  # three rows save 32 tokens each
    assert SharedPrefixes.of(rows, 16, min_tokens=96) is not None
    assert SharedPrefixes.of(siblings(PagePool(200, 16), 4, 15), 16, min_tokens=0) is None  # not one whole page
