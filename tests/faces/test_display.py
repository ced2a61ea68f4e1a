"""What a person watching sees."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from palestra.faces.cli.common import show_seconds, sparkline
from palestra.faces.cli.display import LineDisplay, LiveDisplay, Phase, make_display

ROW = {"reward_mean": 0.5, "pass_rate": 0.25, "sample_tokens_per_second": 1234.0}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def test_terminal_gets_the_live_display_and_a_file_plain_lines():
    assert isinstance(make_display(console(terminal=True), 1), LiveDisplay)
    assert isinstance(make_display(console(terminal=False), 1), LineDisplay)


def test_plain_display_keeps_to_log_every_and_always_says_the_last_step():
    out = console(terminal=False)
    display = LineDisplay(out, log_every=3)
    display.phase("training", 7)
    for step in range(1, 8):
        display.advance(step, ROW)
    lines = out.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["3/7", "6/7", "7/7"]
    assert "reward 0.50" in lines[1]
    assert "pass rate  25%" in lines[1]
    assert "1,234 tokens/s" in lines[1]


def test_plain_display_says_start_and_end_of_an_evaluation_only():
    out = console(terminal=False)
    display = LineDisplay(out, log_every=1)
    display.phase("scoring before", 50)
    for done in range(1, 51):
        display.advance(done, {})
    assert len(out.file.getvalue().splitlines()) == 2


def test_live_display_shows_the_numbers_and_leaves_a_line_for_each_phase():
    out = console(terminal=True)
    with LiveDisplay(out, log_every=1) as display:
        display.phase("scoring before", 1)
        display.advance(1, {})
        display.phase("training", 2)
        display.advance(1, ROW)
        display.advance(2, ROW | {"pass_rate": 1.0})
        display._live.refresh()
    text = out.file.getvalue()
    for words in ("✓ scoring before", "step 2/2", "pass rate 100%", "1,234 tokens/s", "▃█", "✓ training"):
        assert words in text, words


def test_time_left_of_a_resumed_run_counts_only_what_this_run_did():
    phase = Phase("training", total=100)
    assert phase.seconds_left is None
    phase.began -= 2.0
    phase.advance(91, {})
    assert phase.seconds_left == pytest.approx(18.0, rel=0.1)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (65, "1 min 05 s"), (7800, "2 h 10 min")])
def test_seconds_read_well(seconds, text):
    assert show_seconds(seconds) == text


def test_sparkline_averages_down_to_its_width():
    assert sparkline([0.0] * 50 + [1.0] * 50, width=10) == "▁▁▁▁▁█████"
    assert len(sparkline([0.3] * 7, width=60)) == 7


def test_the_time_left_falls_within_a_step():
    phase = Phase("training", total=3)
    phase.began -= 60.0
    phase.advance(1, {})
    assert phase.seconds_left == pytest.approx(120.0, rel=0.01)
    assert phase.ends is not None
    phase.ends -= 50.0  # so much later
    assert phase.seconds_left == pytest.approx(70.0, rel=0.01)
    phase.ends -= 500.0
    assert phase.seconds_left == 0.0


def test_rollouts_of_the_step_in_progress_are_counted():
    out = console(terminal=True)
    with LiveDisplay(out, log_every=1) as display:
        display.phase("training", 3)
        for _ in range(9):
            display.rollout()
        display._live.refresh()
    assert "step 0/3, 9 rollouts of the next" in out.file.getvalue()


def test_a_log_says_something_although_nothing_ends():
    out = console(terminal=False)
    with LineDisplay(out, log_every=1, silence_s=0.01) as display:
        display.phase("scoring before", 72)
        display.advance(12, {})
        until = time.monotonic() + 5
        while "12/72 after" not in out.file.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert "scoring before: 12/72 after 0 s" in out.file.getvalue()


def test_escape_sequences_in_a_note_are_shown_and_not_obeyed():
    out = console(terminal=False)
    LineDisplay(out, log_every=1).note("\x1b]0;title\x07 für \u202egnp.exe")
    assert out.file.getvalue() == "\\x1b]0;title\\x07 für \\u202egnp.exe\n"
