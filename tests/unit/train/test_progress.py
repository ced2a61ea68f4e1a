"""What a person watching long work sees."""

import io
import time

import pytest
from rich.console import Console

from palestra.evals.run_report.notebook import fragment
from palestra.train.progress import LineDisplay, LiveDisplay, NotebookDisplay, Phase, make_display, task

ROW = {"reward_mean": 0.5, "pass_rate": 0.25, "sample_tokens_per_second": 1234.0}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def test_terminal_gets_the_live_display_and_a_file_plain_lines():
    assert isinstance(make_display(console(terminal=True), 1), LiveDisplay)
    assert isinstance(make_display(console(terminal=False), 1), LineDisplay)


def test_a_notebook_gets_curves_and_a_table_of_the_last_steps():
    display = make_display(Console(file=io.StringIO(), force_jupyter=True))
    assert isinstance(display, NotebookDisplay)
    display.phase("training", 20)
    for step in range(1, 13):
        display.advance(step, {"reward_mean": step / 20, "pass_rate": step / 40, "loss": 0.5})
    display.warn("<script>alert(1)</script>")
    page = fragment(*display._parts())
    assert page.count("<svg") == 2
    assert 'value="12" max="20"' in page
    assert "<td>12</td><td>0.6</td><td>30%</td><td>0.5</td>" in page
    assert "<td>4</td>" not in page, "the last eight steps alone"
    assert "<script" not in page


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
    phase = Phase("training", unit="steps", total=100)
    assert phase.seconds_left is None
    phase.began -= 2.0
    phase.advance(91, {})
    assert phase.seconds_left == pytest.approx(18.0, rel=0.1)


def test_the_time_left_falls_within_a_step():
    phase = Phase("training", unit="steps", total=3)
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


def test_training_goes_on_after_an_evaluation_in_between():
    out = console(terminal=True)
    with LiveDisplay(out) as display:
        display.phase("training", 5)
        display.advance(2, ROW)
        display.phase("evaluating at step 2", 3)
        display.phase("training", 5)
        display._live.refresh()
        assert "step 2/5" in out.file.getvalue()
        display.advance(3, {"reward_mean": 0.75})
        display.rollout()
        display._live.refresh()
    assert "reward 0.75" in out.file.getvalue()
    assert "step 3/5, 1 rollouts of the next" in out.file.getvalue()


def test_a_folder_with_brackets_is_shown_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = console(terminal=False)
    LineDisplay(out).started(tmp_path / "runs" / "[a]")
    assert out.file.getvalue() == "run folder runs/[a]\n"


def test_steps_are_shown_as_the_caller_has_them():
    out = console(terminal=False)
    display = LineDisplay(out, on_step=lambda step, metrics: metrics | {"epoch": step / 2})
    display.phase("training", 5)
    display.advance(1, {})
    assert "epoch 0.50" in out.file.getvalue()


def test_a_short_task_leaves_nothing_behind_in_a_log():
    out = console(terminal=False)
    with task(out, "saving", total=2) as phase:
        phase.advance(1)
        phase.advance(2)
    assert out.file.getvalue() == ""


def test_a_log_says_what_takes_so_long_also_where_nothing_is_counted():
    out = console(terminal=False)
    with LineDisplay(out, silence_s=0.01) as display:
        display.busy("saving the model")
        until = time.monotonic() + 5
        while "saving the model" not in out.file.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert "saving the model … 0 s" in out.file.getvalue()


def test_a_task_is_shown_on_a_terminal_while_it_lasts():
    out = console(terminal=True)
    with task(out, "tiny.gguf", unit="bytes") as phase:
        phase.total = 4_000_000
        phase.advance(1_000_000)
        time.sleep(0.3)  # a refresh
    assert "1 MB of 4 MB" in out.file.getvalue()
    assert "✓" not in out.file.getvalue()
