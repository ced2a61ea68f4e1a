"""A little of what `make fuzz` does at length: no traceback, no hang, nothing lost."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from fuzzing import check, foreign_runs, gguf_files, http_requests, tinker_requests, wire_posts


@pytest.mark.parametrize(
    ("fuzzer", "count"),
    [(gguf_files, 40), (wire_posts, 100), (http_requests, 30), (tinker_requests, 100), (foreign_runs, 8)],
)
def test_mutated_input_is_refused_or_accepted_and_nothing_else(fuzzer, count, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    tally = fuzzer.fuzz(count, random.Random(7), tmp_path)
    assert tally.faults == []
    assert tally.outcomes["refused"] > 0
    assert tally.outcomes["accepted"] > 0


def test_every_fault_is_printed_at_once_also_with_characters_that_no_terminal_takes(capsys):
    tally = check.Tally("texts")
    for number in range(30):
        with tally.watch(f"input {number}"):
            raise ValueError("\ud800 \x1b]0;owned\x07")
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert all(f"  input {number}: ValueError: \\ud800 \\x1b" in shown for number in range(30))
