"""report.html: whole in itself, honest about what it was given."""

from __future__ import annotations

import re
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any

import pytest

from palestra.core.config import RunConfig
from palestra.evals.report import Change, EvalReport, Rate
from palestra.report.charts import Marker, curve, smooth
from palestra.report.page import render

VOID = {"meta", "br", "hr", "img", "link", "input"}


def report(measures: tuple[str, ...] = ("right_total",), steps: int = 5, text: str = "It costs 161.") -> dict[str, Any]:
    before, after = Rate.of(30, 100), Rate.of(90, 100)
    evaluation = EvalReport(before, (), 0.3, 0.0, 0.0, 1.0, 0.0, 1.0).to_dict()
    changes = [Change(name, before, after) for name in (*measures, "all measures")]
    messages = [
        {"role": "user", "text": "What do 7 red lamps cost?", "tool_calls": []},
        {"role": "assistant", "text": "", "tool_calls": [{"name": "multiply", "arguments": {"a": 7}, "error": None}]},
        {"role": "tool", "text": "161", "tool_calls": []},
        {"role": "assistant", "text": text, "tool_calls": []},
    ]
    side = {"passed": True, "stop": "answered", "error": None, "messages": messages, "scores": {}}
    return {
        "agent": "clerk", "model": "palestra/tiny", "run": "clerk-1", "created": "", "source": None, "seed": 0,
        "seconds": 12.0, "instructions": "", "tools": ["multiply"],
        "before": evaluation, "after": evaluation | {"pass_rate": asdict(after)},
        "changes": [{**asdict(c), "gain": c.gain, "clear": c.clear} for c in changes],
        "metrics": [{"step": i + 1, "reward_mean": i / 5, "pass_rate": i / 5} for i in range(steps)],
        "transcripts": [{"before": side | {"passed": False}, "after": side}],
        "config": RunConfig().model_dump(mode="json"), "environment": {"palestra": "0.1.0"},
    }  # fmt: skip


class Tags(HTMLParser):
    """Fails on a tag that is closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("data", [report(), report(("a", "b")), report(steps=0), report(steps=1)])
def test_page_is_well_formed_and_asks_nothing_of_the_network(data):
    page = render(data)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?://|<script", page)


def test_page_shows_the_rates_the_calls_and_the_settings():
    page = render(report())
    for words in ("30.0 %", "90.0 %", "+60.0 points", "multiply(a=7)", "It costs 161.", "train.learning_rate"):
        assert words in page, words


def test_what_a_model_says_cannot_become_markup():
    page = render(report(text="<script>alert(1)</script>"))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_single_measure_is_not_shown_twice():
    assert "all measures" not in render(report(("right_total",)))
    assert "all measures" in render(report(("right_total", "polite")))


def test_evaluations_on_the_way_are_marked():
    data = report()
    data["metrics"].append({"step": 3, "eval/pass_rate": 0.625})
    assert "held-out cases at step 3: 62.5 %" in render(data)


def test_smoothing_keeps_a_constant_and_the_length():
    assert smooth([0.5] * 9) == [0.5] * 9
    assert smooth([]) == []


def test_rewards_outside_of_0_to_1_fit_the_chart():
    svg = curve([(1, -3.0), (2, 7.0)], percent=False, markers=[Marker(2, 7.0, 6.0, 7.0, "here")], title="reward")
    heights = [float(point.split(",")[1]) for line in re.findall(r'points="([^"]+)"', svg) for point in line.split()]
    assert all(0 <= y <= 280 for y in heights)
