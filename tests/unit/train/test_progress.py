"""What a person watching long work sees."""

import io
import time

import pytest
from builders import wait_until
from rich.console import Console

from palestra.evals.run_report.charts import fragment
from palestra.train.progress import LineDisplay, LiveDisplay, NotebookDisplay, Phase, make_display, task

ROW = {"reward_mean": 0.5, "pass_rate": 0.25, "sample_tokens_per_second": 1234.0}


class Screen(Console):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)

    @property
    def text(self) -> str:
        return self.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def log() -> Screen:
    return Screen(terminal=False)


@pytest.fixture
def terminal() -> Screen:
    return Screen(terminal=True)


def test_terminal_gets_the_live_display_and_a_file_plain_lines(log: Screen, terminal: Screen) -> None:
    assert isinstance(make_display(terminal, 1), LiveDisplay)
    assert isinstance(make_display(log, 1), LineDisplay)


def test_a_notebook_gets_curves_and_a_table_of_the_last_steps() -> None:
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


def test_a_log_has_a_line_every_so_many_steps_at_the_last_and_at_both_ends_of_an_evaluation(log: Screen) -> None:
    display = LineDisplay(log, log_every=3, on_step=lambda step, metrics: metrics | {"epoch": step / 2})
    display.phase("training", 7)
    for step in range(1, 8):
        display.advance(step, ROW)
    lines = log.text.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["3/7", "6/7", "7/7"]
    for words in ("reward 0.50", "pass rate  25%", "1,234 tokens/s", "epoch 1.50"):
        assert words in lines[1]
    display.phase("scoring after", 50)
    for done in range(1, 51):
        display.advance(done, {})
    assert len(log.text.splitlines()) == len(lines) + 2


def test_live_display_shows_the_numbers_and_leaves_a_line_for_each_phase(terminal: Screen) -> None:
    with LiveDisplay(terminal, log_every=1) as display:
        display.phase("scoring before", 1)
        display.advance(1, {})
        display.phase("training", 2)
        for _ in range(9):
            display.rollout()
        display._live.refresh()
        assert "step 0/2, 9 rollouts of the next" in terminal.text
        display.advance(1, ROW)
        display.phase("evaluating at step 1", 3)
        display.phase("training", 2)  # goes on after the evaluation
        display._live.refresh()
        assert "step 1/2" in terminal.text
        display.advance(2, ROW | {"pass_rate": 1.0})
        display._live.refresh()
    for words in ("✓ scoring before", "step 2/2", "pass rate 100%", "1,234 tokens/s", "▃█", "✓ training"):
        assert words in terminal.text, words


def test_time_left_of_a_resumed_run_counts_only_what_this_run_did_and_falls_within_a_step() -> None:
    phase = Phase("training", unit="steps", total=100)
    assert phase.seconds_left is None
    phase.began -= 2.0
    phase.advance(91, {})
    assert phase.seconds_left == pytest.approx(18.0, rel=0.1)
    assert phase.ends is not None
    phase.ends -= 10.0  # so much later
    assert phase.seconds_left == pytest.approx(8.0, rel=0.1)
    phase.ends -= 500.0
    assert phase.seconds_left == 0.0


def test_a_log_says_something_although_nothing_ends(log: Screen) -> None:
    with LineDisplay(log, log_every=1, silence_s=0.01) as display:
        display.phase("scoring before", 72)
        display.advance(12, {})
        wait_until(lambda: "scoring before: 12/72 after 0 s" in log.text)
        display.busy("saving the model")
        wait_until(lambda: "saving the model … 0 s" in log.text)


def test_what_others_wrote_is_shown_and_not_obeyed(log: Screen, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    LineDisplay(log).note("\x1b]0;title\x07 für \u202egnp.exe")
    LineDisplay(log).started(tmp_path / "runs" / "[a]")
    assert log.text.splitlines() == ["\\x1b]0;title\\x07 für \\u202egnp.exe", "run folder runs/[a]"]


def test_a_task_is_shown_on_a_terminal_while_it_lasts_and_leaves_nothing_in_a_log(log, terminal) -> None:
    with task(terminal, "tiny.gguf", unit="bytes") as phase:
        phase.total = 4_000_000
        phase.advance(1_000_000)
        time.sleep(0.3)  # a refresh
    assert "1 MB of 4 MB" in terminal.text
    assert "✓" not in terminal.text
    with task(log, "saving", total=2) as phase:
        phase.advance(2)
    assert log.text == ""
