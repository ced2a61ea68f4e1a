"""Values as text for people."""

import pytest

from palestra.core.show import show_seconds, sparkline


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (65, "1 min 05 s"), (7800, "2 h 10 min")])
def test_seconds_read_well(seconds, text):
    assert show_seconds(seconds) == text


def test_sparkline_averages_down_to_its_width():
    assert sparkline([0.0] * 50 + [1.0] * 50, width=10) == "▁▁▁▁▁█████"
    assert len(sparkline([0.3] * 7, width=60)) == 7
