"""Progress of runs from Python."""

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from palestra.train.progress import Bar, Lines, console_progress


def test_a_terminal_has_a_bar_and_a_file_has_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(console_progress(Console(file=io.StringIO(), force_terminal=True)), Bar)
    assert isinstance(console_progress(Console(file=io.StringIO())), Lines)
    notebook = Console(file=io.StringIO(), force_jupyter=True)
    for spec, kind in ((None, Lines), ("found", Bar)):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert isinstance(console_progress(notebook), kind)


def test_the_bar_shows_the_phase_and_its_numbers() -> None:
    out = io.StringIO()
    with Bar(Console(file=out, force_terminal=True, width=120)) as bar:
        bar.started(Path("runs/[a]"))
        bar.phase("training", 5)
        bar.advance(2, {"loss": 0.5, "reward_mean": 0.25, "pass_rate": 0.5})
        bar.phase("evaluating at step 2", 3)
        bar.phase("training", 5)
        bar.advance(3, {"reward_mean": 0.75})
        bar.rollout()
    text = out.getvalue()
    assert "run folder runs/[a]" in text
    assert "reward 0.750  1 rollouts" in text
    assert "3/5" in text


def test_a_line_is_written_every_so_often_also_while_nothing_advances() -> None:
    out = io.StringIO()
    with Lines(Console(file=out, width=200), every_s=0.01) as lines:
        lines.phase("training", 5)
        lines.advance(2, {"reward_mean": 0.25})
        lines.rollout()
        until = time.monotonic() + 5
        while out.getvalue().count("training: 2/5  reward 0.250  1 rollouts since") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert out.getvalue().startswith("training: 5 steps\n")
    assert out.getvalue().count("training: 2/5  reward 0.250  1 rollouts since") >= 2
