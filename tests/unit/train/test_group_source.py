from loop_fakes import PROBLEMS

from palestra.train.group_source import draw


def test_every_problem_comes_once_an_epoch_however_the_stream_is_cut() -> None:
    stream = draw(PROBLEMS, 0, 30, seed=1)
    for epoch in range(3):
        assert sorted(p.id for p in stream[epoch * 10 : epoch * 10 + 10]) == [p.id for p in PROBLEMS]
    assert stream[:10] != stream[10:20]
    assert draw(PROBLEMS, 0, 7, seed=1) + draw(PROBLEMS, 7, 23, seed=1) == stream
    assert draw(PROBLEMS, 0, 30, seed=2) != stream
