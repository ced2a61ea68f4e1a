"""Results on the terminal: transcripts in order, graded scores with their value, commands that can be pasted."""

import io
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from palestra.cli.summary import change_table, outcome_summary, print_evaluation, print_findings, score_command
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message, Rollout, Score
from palestra.evals.evidence import Finding
from palestra.evals.report import EvalReport, pick_transcripts
from palestra.evals.rollout_stats import Example
from palestra.evals.run_report.write import write_report
from palestra.train.run import Outcome

TALK = (
    Message("system", "Be kind."),
    Message("user", "Where is the lamp?"),
    Message("assistant", "Which lamp?"),
    Message("user", "The red one."),
    Message("tool", "\x1b[31mshelf 3\x1b[0m", name="look"),
    Message("assistant", "On shelf 3."),
)


def rollout(problem: str, messages: tuple[Message, ...] = TALK, value: float = 0.25) -> Rollout:
    return Rollout(problem, (), messages, "answered", scores={"close": Score(value, value == 1.0, "1 of 4 words")})


def test_a_transcript_keeps_its_order_and_shows_values_and_no_escape_sequence() -> None:
    out = Console(file=io.StringIO(), width=100)
    print_evaluation(out, "clerk", EvalReport.of([rollout("1")], seconds=1.0))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    words = (
        "Where is the lamp?",
        "Which lamp?",
        "The red one.",
        "\\x1b[31mshelf 3",
        "On shelf 3.",
        "0.25, 1 of 4 words",
    )
    places = [text.index(word) for word in words]
    assert places == sorted(places)
    assert "\x1b" not in text
    assert text.count("Where is the lamp?") == 1
    assert "Be kind." not in text


def test_the_report_keeps_the_order_of_turns(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "clerk", RunConfig(), {})
    report = EvalReport.of([rollout("1")], seconds=1.0)
    page = write_report(folder, report, report, [], 1.0).read_text()
    words = ("Where is the lamp?", "Which lamp?", "The red one.", "On shelf 3.", "close 0.25")
    places = [page.index(word) for word in words]
    assert places == sorted(places)
    assert page.count("Where is the lamp?") == 1


def test_the_transcripts_are_of_different_kinds_of_cases() -> None:
    questions = [*(f"Where is my order {i}?" for i in (1, 2, 3)), "Cancel it.", "A refund, please!"]
    rollouts = [rollout(str(i), (Message("user", text),)) for i, text in enumerate(questions)]
    shown = [after.messages[0].text for _, after in pick_transcripts(rollouts, rollouts)]
    assert shown == ["Where is my order 1?", "Cancel it.", "A refund, please!"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"source": "агент ünï.py"}, ["eval", "агент ünï.py"]),
        ({"source": "palestra.demo"}, ["eval"]),
        (
            {"environment": {"name": "my env.py", "settings": {"level": 2, "text": "a b"}}},
            ["env", "evaluate", "my env.py", "--env.level", "2", "--env.text", "a b"],
        ),
        (
            {"agent_options": {"agent_cmd": "a b", "cases": "/c.jsonl", "measure": ["/s.py:score"], "cwd": "/x"}},
            ["eval", "--agent-cmd", "a b", "--cases", "/c.jsonl", "--measure", "/s.py:score"],
        ),
    ],
)
def test_the_command_that_scores_a_model_can_be_pasted(tmp_path, monkeypatch, record, words):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path, "x", RunConfig(), record, at=tmp_path / "my run")
    command = shlex.split(score_command(folder, folder.model))
    assert command == ["palestra", *words, "--model.name", "my run/model"]


def shown(*printed: object) -> str:
    out = Console(file=io.StringIO(), width=120)
    for thing in printed:
        out.print(thing)
    return out.file.getvalue()  # type: ignore[attr-defined]


def graded(*values: float) -> EvalReport:
    rollouts = [replace(rollout(str(i), value=value), reward=3.5 * value) for i, value in enumerate(values)]
    return EvalReport.of(rollouts, seconds=1.0)


def test_a_graded_measure_shows_its_mean_with_an_interval_and_the_rewards_their_scale() -> None:
    text = shown(change_table(graded(0.0, 0.25, 0.25), graded(0.5, 0.5, 0.75)))
    assert "mean close" in text
    assert "0.167 (0.003–0.250)" in text
    assert "0.583 (0.500–0.747)" in text
    assert "+0.417" in text
    assert "mean reward" in text
    assert "rewards are from 0 to 2.62" in text


def test_a_measure_that_passes_or_fails_has_no_mean_beside_its_rate() -> None:
    before, after = (EvalReport.of([replace(rollout("1", value=v), reward=v)], seconds=1.0) for v in (0.0, 1.0))
    text = shown(change_table(before, after))
    assert "mean" not in text
    assert "Held-out cases" in text
    assert "Training cases" in shown(change_table(*(replace(r, split="train") for r in (before, after))))


def test_an_evaluation_shows_means_and_what_stood_in_the_way() -> None:
    out = Console(file=io.StringIO(), width=120)
    cut_off = [replace(rollout(str(i)), stop="context_full") for i in range(4)]
    print_evaluation(out, "clerk", EvalReport.of(cut_off, seconds=1.0))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "0.250 (0.250–0.250)" in text
    assert "training cases" not in text
    print_evaluation(out, "clerk", replace(EvalReport.of(cut_off, seconds=1.0), split="train"))
    assert "training cases (none are held out)" in out.file.getvalue()  # type: ignore[attr-defined]
    assert "! 100% of the rollouts in the evaluation were cut off because the model's context" in text
    assert "capability: no tools, 100 % truncated\n" in text
    several = [rollout("1"), rollout("1"), rollout("2"), rollout("2")]
    print_evaluation(out, "clerk", EvalReport.of(several, seconds=1.0))
    assert "pass@1 0 %, pass@2 0 %" in out.file.getvalue()  # type: ignore[attr-defined]


def test_a_finding_is_printed_with_where_to_look() -> None:
    out = Console(file=io.StringIO(), width=200)
    example = Example("after", 0, 4, "p", "la\x1b[31m")
    print_findings(out, [Finding("looping", "It loops.", (), example), Finding("x", "Slow.")])
    assert out.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "! It loops.",
        "  Example (evals/after.jsonl, line 5): la\\x1b[31m",
        "! Slow.",
    ]


def test_the_page_leads_with_the_mean_where_pass_rates_say_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "clerk", RunConfig(), {})
    folder.add_to_record(capability={"text": "2 calls per <attempt>"})
    finding = Finding("looping", "It <loops>.", ("model.name",), Example("train", 3, 4, "p", "la <la>"))
    page = write_report(folder, graded(0.0, 0.25), graded(0.5, 0.75), [], 1.0, [finding]).read_text()
    words = " ".join(page.split())
    assert '<span class="from">0.12</span><span class="arrow">→</span><span class="to">0.62</span>' in words
    assert "It &lt;loops&gt;." in words
    assert "Example (rollouts.jsonl, step 3, rollout 4): la &lt;la&gt;" in words
    assert "Before training:</span> 2 calls per &lt;attempt&gt;" in words
    assert "mean close" in words
    assert "(0 to 0.75)" in words


@pytest.mark.parametrize("split", ["held_out", "train"])
def test_the_json_of_a_training_calls_its_pass_rates_by_what_was_scored(tmp_path: Path, split: str) -> None:
    before, after = (EvalReport.of([rollout("1", value=v)], 1.0, split) for v in (0.0, 1.0))  # type: ignore[arg-type]
    outcome = Outcome(None, None, tmp_path, before, after, [], 1.0, tmp_path / "report.html")
    summary = outcome_summary(RunFolder(tmp_path), outcome)
    rates = {key: value for key, value in summary.items() if key.endswith(("_before", "_after"))}
    assert rates == {f"{split}_before": 0.0, f"{split}_after": 1.0}
