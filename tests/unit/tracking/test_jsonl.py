"""What the files of a run folder hold, and what is left of them after a resume."""

from __future__ import annotations

import json
from pathlib import Path

from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Message, Rollout, Score
from palestra.evals.report import EvalReport
from palestra.tracking.jsonl import JsonlTracker
from palestra.train.evaluation import read_evaluation, write_evaluation


def rollout(problem_id: str, text: str = "hi") -> Rollout:
    scores = {"ok": Score(1.0, True)}
    return Rollout(problem_id, (), (Message("assistant", text),), "answered", scores=scores, reward=1.0)


def test_a_resumed_run_drops_the_steps_that_it_repeats_and_a_cut_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    first = JsonlTracker(run)
    for step in (1, 2, 3):
        first.metrics(step, {"loss": step / 2})
        first.rollouts(step, [Group("p", (rollout("p", f"line\u2028{step}"),))])
    with run.metrics_file.open("a") as file:
        file.write('{"step": 2, "eval/pass')
    second = JsonlTracker(run, resume_after=2)
    second.metrics(3, {"loss": 9.0})
    assert run.metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 9.0}]
    assert [row["step"] for row in run.rollouts()] == [1, 2]
    assert next(run.rollouts())["messages"][0]["text"] == "line\u20281"


def test_the_rollouts_of_an_evaluation_are_a_file_that_the_next_one_replaces(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_evaluation(run.eval_file("before"), EvalReport.of([rollout("a"), rollout("b")], 1.0))
    write_evaluation(run.eval_file(50), EvalReport.of([rollout("a")], 1.0))
    assert [row["problem_id"] for row in run.eval_rollouts("before")] == ["a", "b"]
    write_evaluation(run.eval_file("before"), EvalReport.of([rollout("c")], 1.0))
    assert [row["problem_id"] for row in run.eval_rollouts("before")] == ["c"]
    assert json.loads(run.eval_file(50).read_text())["passed"] is True
    assert run.eval_names() == ["before", 50]
    read = read_evaluation(run.eval_file("before"))
    assert read is not None
    assert (read.pass_rate.passed, read.pass_rate.n) == (1, 1)
    assert read_evaluation(run.eval_file("after")) is None
