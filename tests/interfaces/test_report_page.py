"""report.html: whole in itself, honest about what it was given."""

import re
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from typing import Any

import pytest

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message, Rollout, Score
from palestra.evals.report import Change, EvalReport, Mean, Rate
from palestra.evals.run_report.charts import Marker, curve, smooth
from palestra.evals.run_report.write import render, write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}


def report(measures: tuple[str, ...] = ("right_total",), steps: int = 5, text: str = "It costs 161.") -> dict[str, Any]:
    before, after = Rate.of(30, 100), Rate.of(90, 100)
    evaluation = EvalReport(before, (), Mean.of([0.3]), 0.0, 0.0, 1.0, 0.0, 1.0).to_dict()
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
    without_text = re.sub(r">[^<]*<", "><", page)  # a setting may be an address
    assert not re.search(r"(src|href)\s*=|@import|https?://|<script", without_text)
    assert not re.search(r"url\(|@import", page)


def test_page_shows_the_rates_the_calls_the_settings_and_evaluations_on_the_way():
    data = report()
    data["metrics"].append({"step": 3, "eval/pass_rate": 0.625})
    page = render(data)
    for words in ("30.0 %", "90.0 %", "+60.0 points", "multiply(a=7)", "It costs 161.", "train.learning_rate"):
        assert words in page, words
    assert "held-out cases at step 3: 62.5 %" in page
    assert "all measures" not in page, "a single measure is not shown twice"
    assert "all measures" in render(report(("right_total", "polite")))
    for when in ("before", "after"):
        data[when] = {**data[when], "split": "train"}
    page = render(data)
    assert "held-out" not in page
    assert "training cases at step 3: 62.5 %" in page


def test_what_a_model_says_cannot_become_markup():
    page = render(report(text="<script>alert(1)</script>"))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (("before", "after"), "There was no held-out evaluation"),
        (("before",), "only after training: 90.0 % of 100 attempts passed"),
    ],
)
def test_a_page_without_evaluations_says_so_and_shows_no_zeros(missing, words):
    page = render(report() | {"changes": [], "transcripts": []} | dict.fromkeys(missing))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert words in " ".join(page.split())
    assert "0.0 %" not in page.replace("90.0 %", "")
    assert "train.learning_rate" in page


def rollout(problem_id: str, passed: bool) -> Rollout:
    scores = {"right": Score(float(passed), passed)}
    return Rollout(problem_id, (), (Message("user", "hi"),), "answered", scores=scores, reward=float(passed))


def test_write_report_reads_what_the_run_is_from_its_folder(tmp_path):
    tools = [{"type": "function", "function": {"name": "price"}}]
    record = {"agent": "clerk", "instructions": "Be kind.", "tools": tools, "source": "my_agent.py"}
    folder = RunFolder.create(tmp_path, "clerk", RunConfig.build({"seed": 3}), record)
    before, after = (EvalReport.of([rollout("a", passed)], 1.0) for passed in (False, True))
    path = write_report(folder, before, after, [{"step": 1, "reward_mean": 0.5}], 12.0, device="a GPU")
    assert path == folder.report_page
    assert "Be kind." in path.read_text()
    data = folder.report()
    assert (data["agent"], data["tools"], data["seed"], data["seconds"]) == ("clerk", ["price"], 3, 12.0)
    assert (data["before"]["pass_rate"]["rate"], data["after"]["pass_rate"]["rate"]) == (0.0, 1.0)
    assert [change["name"] for change in data["changes"]] == ["right", "all measures"]
    assert len(data["transcripts"]) == 1
    assert data["environment"]["device"] == "a GPU"


def test_write_report_without_evaluations(tmp_path):
    folder = RunFolder.create(tmp_path, "wire", RunConfig(), {"env_url": "http://127.0.0.1:8001"})
    page = write_report(folder, None, None, [{"step": 1, "reward_mean": 0.5}], 1.0)
    assert "no held-out evaluation" in page.read_text()
    data = folder.report()
    assert (data["agent"], data["before"], data["after"], data["changes"]) == ("wire", None, None, [])


def test_the_report_needs_no_torch():
    code = "import sys, palestra.evals.run_report.write; assert not {'torch', 'click', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rewards_outside_of_0_to_1_fit_the_chart_and_smoothing_keeps_a_constant():
    svg = curve([(1, -3.0), (2, 7.0)], percent=False, markers=[Marker(2, 7.0, 6.0, 7.0, "here")], title="reward")
    heights = [float(point.split(",")[1]) for line in re.findall(r'points="([^"]+)"', svg) for point in line.split()]
    assert all(0 <= y <= 280 for y in heights)
    assert (smooth([0.5] * 9), smooth([])) == ([0.5] * 9, [])
