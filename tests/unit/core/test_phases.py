import threading
import time

import pytest

from palestra.core.phases import Phases


def test_each_moment_counts_for_the_innermost_phase_alone():
    phases = Phases()
    with phases("outer"):
        time.sleep(0.01)
        with phases("inner"):
            time.sleep(0.03)
    found = phases.take()
    assert 0.01 <= found["outer"] < found["inner"]
    assert found["inner"] >= 0.03


def test_what_is_taken_is_counted_once_also_in_the_middle_of_a_phase():
    phases = Phases()
    with phases("outer"):
        time.sleep(0.01)
        first = phases.take()["outer"]
    assert first >= 0.01
    assert phases.take().get("outer", 0.0) < first
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
