"""What the files of a run folder hold, and what is left of them after a resume."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from palestra.core.files import read_jsonl
from palestra.core.group_codec import rollout_from_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Message, Problem, Rollout, Score
from palestra.evals.report import EvalReport
from palestra.runs.reader import progress
from palestra.runs.tracking import JsonlTracker
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


def test_lines_that_are_no_rows_are_passed_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics_file.write_text('7\nnull\n{"step": null}\n{}\n[1]\n{"step": 1, "elapsed_seconds": 2}\n{"step": 2}\n')
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert progress(run)["step"] == 2
    JsonlTracker(run, resume_after=1)
    assert run.metrics_file.read_text() == '{"step": 1, "elapsed_seconds": 2}\n'


def test_rollouts_are_thinned_as_asked(tmp_path: Path) -> None:
    for every, steps in ((1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])):
        run = RunFolder(tmp_path / str(every))
        run.path.mkdir()
        tracker = JsonlTracker(run, rollouts_every=every)
        for step in (1, 2, 3, 4):
            tracker.rollouts(step, [Group("p", (rollout("p"),))])
        tracker.flush()
        assert [row["step"] for row in run.rollouts()] == steps


@pytest.mark.parametrize("every", [0, 1, 100])
def test_rollouts_or_tokens_that_could_not_be_written_end_the_run_in_the_next_step(tmp_path: Path, every: int) -> None:
    tracker = JsonlTracker(RunFolder(tmp_path / "gone"), rollouts_every=every)
    tracker.rollouts(1, [Group("p", (rollout("p"),))])
    if every != 1:  # then the rollouts are not written
        tracker.tokens(1, lambda: np.zeros(1))
    with pytest.raises(FileNotFoundError):
        tracker.rollouts(2, [])
    tracker.close()


class NoText:
    def __str__(self) -> str:
        raise RuntimeError("no text")


CYCLIC: list[object] = []
CYCLIC.append(CYCLIC)
DEEP: list[object] = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize("value", ["\ud83d", CYCLIC, DEEP, NoText(), b"\xff"], ids=lambda value: type(value).__name__)
def test_a_record_that_cannot_be_written_costs_none_of_the_others(tmp_path: Path, value: object) -> None:
    run = RunFolder(tmp_path)
    tracker = JsonlTracker(run)
    odd = replace(rollout("odd"), scores={"ok\ud83d": Score(1.0, True)}, info={"result": value})
    tracker.rollouts(1, [Group("p", (rollout("a"), odd, rollout("b")))])
    tracker.rollouts(2, [Group("p", (rollout("c"),))])
    tracker.close()
    rows = list(run.rollouts())
    assert [row["problem_id"] for row in rows] == ["a", "odd", "b", "c"]
    assert [rollout_from_dict(row).reward for row in rows] == [1.0] * 4
    assert list(rows[1]["scores"]) == ["ok?"]
    if value == "\ud83d":
        assert (rows[1]["info"], rows[1]["error"]) == ({"result": "?"}, None)
    else:
        assert rows[1]["info"] == {}
        assert "info" in rows[1]["error"]


def test_an_evaluation_of_an_older_version_gets_the_ids_that_its_problems_have_now(tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    write_evaluation(path, EvalReport.of([rollout("suite-0")], 1.0))
    read = read_evaluation(path, problems=[Problem("held_out/suite-0", "hi")])
    assert read is not None
    assert [r.problem_id for r in read.rollouts] == ["held_out/suite-0"]


def test_the_rollouts_of_an_evaluation_are_a_file_that_the_next_one_replaces(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    write_evaluation(run.eval_file("before"), EvalReport.of([rollout("a"), rollout("b")], 1.0))
    write_evaluation(run.eval_file(50), EvalReport.of([rollout("a")], 1.0))
    assert [row["problem_id"] for row in read_jsonl(run.eval_file("before"))] == ["a", "b"]
    write_evaluation(run.eval_file("before"), EvalReport.of([rollout("c")], 1.0))
    assert [row["problem_id"] for row in read_jsonl(run.eval_file("before"))] == ["c"]
    assert json.loads(run.eval_file(50).read_text())["passed"] is True
    assert run.eval_names() == ["before", 50]
    read = read_evaluation(run.eval_file("before"))
    assert read is not None
    assert (read.pass_rate.passed, read.pass_rate.n) == (1, 1)
    assert read_evaluation(run.eval_file("after")) is None


def test_token_files_of_steps_that_are_done_again_are_dropped(tmp_path) -> None:
    run = RunFolder(tmp_path)
    tracker = JsonlTracker(run)
    for step in (1, 2, 3):
        tracker.tokens(step, partial(np.zeros, step))
    tracker.flush()
    assert len(np.load(run.tokens_file(2))) == 2
    JsonlTracker(run, resume_after=1)
    assert list(run.tokens_files()) == [1]
