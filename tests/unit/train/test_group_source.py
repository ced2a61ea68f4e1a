from collections import Counter

from palestra.core.types import Problem
from palestra.train.group_source import draw

PROBLEMS = [Problem(str(i), f"question {i}") for i in range(10)]


def test_every_problem_comes_once_an_epoch() -> None:
    stream = draw(PROBLEMS, 0, 30, seed=1)
    for epoch in range(3):
        assert Counter(p.id for p in stream[epoch * 10 : epoch * 10 + 10]) == Counter(p.id for p in PROBLEMS)
    assert stream[:10] != stream[10:20]


def test_the_stream_is_the_same_however_it_is_cut() -> None:
    whole = draw(PROBLEMS, 0, 23, seed=1)
    assert draw(PROBLEMS, 0, 7, seed=1) + draw(PROBLEMS, 7, 16, seed=1) == whole
    assert draw(PROBLEMS, 0, 23, seed=2) != whole
