"""Run folders: the names of their files, which folders open, and what may be changed of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import NotFoundError, PalestraError, SettingError, StateError, UnreadableFileError
from palestra.core.run_folder import FORMAT, PathBelow, Resume, RunFolder, last_checkpoint, step_of


def make(parent: Path, train: dict[str, int] | None = None) -> RunFolder:
    return RunFolder.create(parent, "run", RunConfig.build({"train": train or {}}), {})


def add_checkpoint(run: RunFolder, step: int) -> Path:
    run.step_folder(step).mkdir(parents=True)
    (run.step_folder(step) / "manifest.json").write_text("{}")
    return run.step_folder(step)


NAMES = """
record_file run.json, config_file config.yaml, metrics_file metrics.jsonl, rollouts_file rollouts.jsonl,
demonstrations_file demonstrations.jsonl, teacher_file teacher.jsonl, evals evals, checkpoints checkpoints, model model,
export export, queue_file queue.sqlite, tokens tokens, tinker tinker, dashboard_index dashboard.db,
report_file report.json, report_page report.html, request_file request.json, index_file index.json, lock_file run.lock,
logs logs, wire wire, env_checkpoints environments, tokenizer tokenizer, tensorboard tensorboard,
wandb_id_file wandb_run_id, wandb_url_file wandb_url, mlflow_id_file mlflow_run_id, mlflow_database mlflow.db,
mlflow_artifacts mlflow_artifacts
"""


def test_every_path_is_the_one_of_version_0_1() -> None:
    run = RunFolder(Path("a"))
    names = [name for name, value in vars(RunFolder).items() if isinstance(value, PathBelow)]
    expected = dict(pair.split() for pair in NAMES.split(","))
    assert {name: getattr(run, name) for name in names} == {key: Path("a", name) for key, name in expected.items()}
    assert run.step_folder(50) == Path("a/checkpoints/step-000050")
    assert run.eval_file("before") == Path("a/evals/before.jsonl")
    assert run.eval_file(50) == Path("a/evals/step-000050.jsonl")
    assert run.log_file("env") == Path("a/logs/env.log")


def test_a_new_run_has_its_record_its_config_and_a_format(tmp_path: Path) -> None:
    config = RunConfig.build({"lora.r": 8})
    run = RunFolder.create(tmp_path, "my agent", config, {"source": "a.py"})
    assert run.path.name.startswith("my-agent-2")
    assert run.config == config
    assert run.record | {"created": ""} == {"format": FORMAT, "name": "my-agent", "created": "", "source": "a.py"}
    assert RunFolder.open(run.path) == run


def test_a_folder_that_is_there_becomes_a_run_once(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "x", RunConfig(), {}, at=tmp_path / "here")
    with pytest.raises(StateError, match="holds a run already"):
        RunFolder.create(tmp_path, "x", RunConfig(), {}, at=tmp_path / "here")


def test_a_folder_without_a_format_is_of_version_0_1_and_opens(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"name": "old", "created": "20260101-101500", "source": None}))
    run = RunFolder.open(tmp_path)
    assert (run.format, run.record["name"]) == (0, "old")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "has no run.json"),
        ("{", "is not valid JSON"),
        (json.dumps({"format": FORMAT + 1}), f"format {FORMAT + 1}, and this Palestra reads formats up to {FORMAT};"),
    ],
    ids=["missing", "cut", "newer"],
)
def test_what_is_no_run_folder_of_ours_is_refused(tmp_path: Path, record: str | None, words: str) -> None:
    if record is not None:
        (tmp_path / "run.json").write_text(record)
    with pytest.raises(PalestraError, match=words):
        RunFolder.open(tmp_path)


def test_a_config_that_was_cut_at_the_end_of_a_line_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path, {"max_steps": 7})
    lines = run.config_file.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        run.config_file.write_text("".join(lines[:count]))
        with pytest.raises(UnreadableFileError, match=r"cannot be read \(.*\); restore it from a copy"):
            _ = run.config
    for whole in ("".join(lines), "".join(lines[1:-1])):  # without both marks: as Palestra 0.1 wrote it
        run.config_file.write_text(whole)
        assert run.config.train.max_steps == 7


def test_rows_are_read_one_at_a_time_and_a_cut_last_line_is_not(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert list(run.rollouts()) == []
    run.metrics_file.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert run.metrics() == [{"step": 1, "loss": 0.5}]
    whole, cut = json.dumps({"text": "für\u2028immer"}, ensure_ascii=False).encode(), '{"text": "f\u00fc'.encode()[:-1]
    run.rollouts_file.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    rollouts = run.rollouts()
    assert next(rollouts) == {"step": 1}
    with run.rollouts_file.open("ab") as file:
        file.write(whole + b"\n" + cut)  # in the middle of a character
    assert list(rollouts) == [{"step": 2}, {"text": "für\u2028immer"}]


def test_evaluations_are_listed_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.eval_names() == []
    run.evals.mkdir()
    for name in ("after", 100, "before", 50):
        run.eval_file(name).write_text('{"passed": true}\n')  # type: ignore[arg-type]
    assert run.eval_names() == ["before", 50, 100, "after"]


def test_the_report_is_none_until_it_is_whole(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.report() is None
    run.report_file.write_text('{"after"')
    assert run.report() is None
    run.report_file.write_text('{"after": null}')
    assert run.report() == {"after": None}


def test_only_finished_checkpoints_are_listed_oldest_first(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.step_checkpoints() == []
    assert run.last_checkpoint() is None
    steps = [add_checkpoint(run, step) for step in (50, 1_000_000, 999_999)]
    run.step_folder(2_000_000).mkdir()
    (run.checkpoints / ".step-000060.partial").mkdir()
    assert run.step_checkpoints() == [steps[0], steps[2], steps[1]]
    assert run.last_checkpoint() == last_checkpoint(run.checkpoints) == steps[1]
    assert step_of(steps[1]) == 1_000_000
    assert [path.name for path in run.partial_checkpoints()] == [".step-000060.partial"]


def test_a_run_ends_anywhere_after_the_steps_that_it_has(tmp_path: Path) -> None:
    run = make(tmp_path, {"max_steps": 100})
    for steps in (60, 61, 80, 500):
        assert Resume(run.path, max_steps=steps).config(run.config, done=60).train.max_steps == steps
    assert Resume(run.path, finish=True).config(run.config, done=60).train.max_steps == 60
    assert Resume(run.path).config(run.config, done=60) == run.config
    assert Resume(str(run.path)) == Resume(run.path)  # type: ignore[arg-type]
    go_back = f"or go back: palestra train --resume {run.path} --from-checkpoint STEP"
    with pytest.raises(SettingError, match=re.escape(f"has 60 steps already; give 60 or more, {go_back}")):
        Resume(run.path, max_steps=59).config(run.config, done=60)


def test_checkpoints_are_named_by_step_or_as_the_best_or_the_last(tmp_path: Path) -> None:
    run = make(tmp_path)
    first, second = add_checkpoint(run, 50), add_checkpoint(run, 100)
    (second / "state.json").write_text(json.dumps({"best_step": 50}))
    for name in ("50", "best", "step-000050"):
        assert run.checkpoint(name) == first
    for name in ("100", "last", "step-000100"):
        assert run.checkpoint(name) == second
    with pytest.raises(NotFoundError, match="no checkpoint '7'; it has 50, 100, best, last"):
        run.checkpoint("7")
    assert RunFolder.around(first) == RunFolder.around(run.model) == run
    assert RunFolder.around(tmp_path / "elsewhere" / "model") is None


def test_the_time_of_a_run_counts_what_it_took_before_it_was_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.elapsed_s() == 0.0
    run.metrics_file.write_text('{"step": 1, "sample_seconds": 2, "train_seconds": 3}\n')  # as 0.1 wrote them
    assert run.elapsed_s() == 5.0
    run.metrics_file.write_text('{"step": 1, "elapsed_seconds": 20}\n{"step": 1, "eval/pass_rate": 1}\n')
    assert run.elapsed_s() == 20.0


def test_a_run_without_a_name_is_tracked_under_its_folders(tmp_path):
    run = RunFolder.create(tmp_path, "demo", RunConfig.build({"track.project": "p"}), {})
    assert run.tracking() == {"project": "p", "run_name": run.path.name, "url": None}
