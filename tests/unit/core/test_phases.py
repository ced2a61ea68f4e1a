import threading

import pytest

from palestra.core import machine
from palestra.core.machine import Phases


class Clock:
    """A clock that stands still unless it is moved on."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(machine, "perf_counter", made)
    return made


def test_each_moment_counts_for_the_innermost_phase_alone(clock):
    phases = Phases()
    with phases("outer"):
        clock.now += 1
        with phases("inner"):
            clock.now += 3
        clock.now += 5
    clock.now += 7
    assert phases.take() == {"outer": 6.0, "inner": 3.0}


def test_what_is_taken_is_counted_once_also_in_the_middle_of_a_phase(clock):
    phases = Phases()
    with phases("outer"):
        clock.now += 2
        assert phases.take() == {"outer": 2.0}
        clock.now += 1
    assert phases.take() == {"outer": 1.0}
    assert phases.take() == {}


def test_a_phase_ends_with_an_error_and_other_threads_have_their_own():
    phases = Phases()
    with pytest.raises(ValueError, match="wrong"), phases("broken"):
        raise ValueError("wrong")
    phases.take()
    with phases("mine"):
        seen: list[dict[str, float]] = []
        thread = threading.Thread(target=lambda: seen.append(phases.take()))
        thread.start()
        thread.join()
    assert seen == [{}]
    assert list(phases.take()) == ["mine"]
