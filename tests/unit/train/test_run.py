"""A run of fakes: what a resume changes on disk, what is made up, and what a checkpoint holds."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_fakes import PROBLEMS, SMALL, FakeCollector, FakeLearner, FakePolicy, Hears, attempt

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, ResourceError, StateError, TrainingError, UserCodeError
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.types import Problem, Rollout, Score, ToolCall, ToolResult
from palestra.evals.evidence import Finding, RunFacts
from palestra.evals.report import EvalReport
from palestra.models.loading import LoadedModel
from palestra.train import forecast as forecast_module
from palestra.train import run as run_module
from palestra.train import setup
from palestra.train.group_source import ProblemSource
from palestra.train.limits import setting_warnings
from palestra.train.run import Run
from palestra.train.tasks import Parts
from palestra.train.watcher import Interrupted, Watcher


@dataclass
class FakeTokenizer:
    pad_token_id: int = 0

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@dataclass
class FakeEvaluator:
    phases: list[str] = field(default_factory=list)
    problems: Sequence[Problem] = tuple(PROBLEMS[:3])
    split: str = "held_out"
    rollouts: Sequence[Rollout] = ()
    fails_at: str = ""

    def run(self, runner: asyncio.Runner, watcher: Watcher, phase: str) -> EvalReport:
        self.phases.append(phase)
        if phase == self.fails_at:
            raise RuntimeError("CUDA out of memory")
        return EvalReport.of(self.rollouts, seconds=1.0)


@dataclass
class FakeTask:
    policy: FakePolicy
    scores: FakeEvaluator = field(default_factory=FakeEvaluator)
    problem_count: int = len(PROBLEMS)
    kind: str = "agent"
    breaks: bool = False
    play: Any = FakeCollector.play

    def source(self, parts: Parts) -> ProblemSource:
        if self.breaks:
            raise PalestraError("the environment does not start")
        return ProblemSource(FakeCollector([], self.policy, self.play), PROBLEMS, {}, 2, 0)

    def evaluator(self, parts: Parts) -> Any:
        return self.scores


@dataclass
class Lab:
    """Builds runs of fakes in one folder."""

    folder: RunFolder
    runner: asyncio.Runner
    notes: Any = field(default_factory=Hears)
    evaluator: FakeEvaluator = field(default_factory=FakeEvaluator)

    def build(self, resume: Resume | None = None, **task: Any) -> Run:
        policy = FakePolicy([])
        loaded = LoadedModel(torch.nn.Linear(1, 1), FakeTokenizer(), "fake", "")
        parts: dict[str, Any] = {"learner": FakeLearner([]), "policy": policy, "loaded": loaded, "resume": resume}
        given = FakeTask(policy, self.evaluator, **task)
        return Run.build(self.folder.config, given, self.folder, runner=self.runner, watcher=self.notes, **parts)  # type: ignore[arg-type]

    def train(self, resume: Resume | None = None, **task: Any) -> Run:
        run = self.build(resume, **task)
        run.train()
        return run

    def resume(self, **how: Any) -> Resume:
        return Resume(self.folder.path, **how)

    def set(self, **settings: Any) -> None:
        """Change the run's config on disk; `checkpoint__every` is `checkpoint.every`."""
        changed = {name.replace("__", "."): value for name, value in settings.items()}
        self.folder.config.with_settings(changed).save(self.folder.config_file)

    def files(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(self.folder.path.rglob("*")) if p.is_file()}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(setup, "save_hf", lambda model, tokenizer, folder, record: folder)
    monkeypatch.setattr(run_module, "gpu_name", lambda model: "")
    config = RunConfig.build(SMALL, {"train.max_steps": 6, "checkpoint.every": 2, "checkpoint.keep_last": 9})
    folder = RunFolder.create(tmp_path, "run", config, {"agent": "fake", "instructions": "Be good."}, at=tmp_path / "r")
    with asyncio.Runner() as runner:
        yield Lab(folder, runner)


def steps(folder: RunFolder) -> list[float]:
    return [row["step"] for row in folder.metrics()]


DOWN = ToolResult(ToolCall("c", "search"), "Error: search raised ConnectionError: refused", ok=False, raised=True)
UNFIT = ToolResult(ToolCall("c", "search"), "Error: missing argument 'text'", ok=False)


def calling(*results: ToolResult, **more: Any) -> Rollout:
    return Rollout("p", (), (), "answered", tool_results=results, tool_names=("search",), **more)


def test_a_tool_that_fails_in_every_rollout_stops_the_run_after_the_first_evaluation(lab: Lab) -> None:
    lab.evaluator.rollouts = [calling(DOWN, DOWN) for _ in range(3)]
    with pytest.raises(UserCodeError, match=r"scoring before: the tool search failed in all of its 6 calls, .*refused"):
        lab.train()
    assert lab.evaluator.phases == ["scoring before"]
    assert lab.folder.metrics() == []


def test_what_is_not_the_models_doing_is_told_after_the_first_evaluation(lab: Lab) -> None:
    judge = {"judge": Score(0.0, False, "away", error=True)}
    lab.evaluator.rollouts = [calling(scores=judge), *(calling() for _ in range(8))]
    lab.train()
    assert lab.notes.warnings == [
        "the measure judge raised an error in 1 of 9 rollouts in the evaluation; these are left out. "
        "Example (evals/before.jsonl, line 1): judge: away"
    ]


def test_an_evaluation_that_fails_is_named_with_the_last_good_checkpoint_and_the_model_is_saved(lab, monkeypatch):
    saved: list[Path] = []
    monkeypatch.setattr(setup, "save_hf", lambda model, tokenizer, folder, record: saved.append(folder) or folder)
    lab.evaluator.fails_at = "scoring after"
    words = r"scoring after: RuntimeError: CUDA out of memory\. To need less memory.*-000006"
    with pytest.raises(TrainingError, match=words):
        lab.train()
    assert saved == [lab.folder.model]


def test_the_outcome_and_the_report_say_why_nothing_was_learned(lab: Lab) -> None:
    outcome = lab.build(play=lambda number, problem: [attempt(problem, 0.0)] * 2).train()
    (finding,) = outcome.findings
    assert finding.kind == "zero_reward"
    assert "in 6 of 6 steps every rollout earned a reward of 0" in finding.sentence
    assert finding.example is not None
    assert (finding.example.source, finding.example.step, finding.example.index) == ("train", 6, 0)
    (warning,) = lab.notes.warnings
    assert finding.sentence.replace("6 of 6", "the last 3") in warning
    assert "rollouts.jsonl, step 3, rollout 0" in warning
    assert Finding.from_dict(lab.folder.report()["findings"][0]) == finding  # type: ignore[index]
    assert "in 6 of 6 steps every rollout earned" in outcome.report_path.read_text()
    assert "Example (rollouts.jsonl, step 6, rollout 0)" in outcome.report_path.read_text()


def test_the_capability_of_the_initial_model_is_shown_and_recorded_once(lab: Lab) -> None:
    lab.evaluator.rollouts = [calling(UNFIT), calling(UNFIT, UNFIT, UNFIT)]
    lab.build(play=lambda number, problem: [attempt(problem, 0.0), attempt(problem, float(number == 0))]).train()
    (line,) = [line for line in lab.notes.notes if line.startswith("capability")]
    assert line.startswith("capability: 2 calls per attempt, 100 % parsed")
    assert "100 % invalid arguments" in line
    assert "pass@1" in line
    assert "pass@2" in line
    recorded = lab.folder.report()["capability"]  # type: ignore[index]
    assert f"capability: {recorded['text']}" == line
    assert recorded["text"] in lab.folder.report_page.read_text()
    lab.notes.notes.clear()
    lab.train(lab.resume(max_steps=8))
    assert not [line for line in lab.notes.notes if line.startswith("capability")], "no longer the initial model"
    assert lab.folder.report()["capability"] == recorded  # type: ignore[index]


def test_a_run_on_disk_says_how_its_rollouts_are_made_and_every_checkpoint_has_a_tokenizer(lab: Lab) -> None:
    lab.train(kind="program")
    assert RunFacts.of_folder(lab.folder).kind == "program"
    for checkpoint in lab.folder.step_checkpoints():
        assert (checkpoint / "tokenizer.json").is_file()
        assert json.loads((checkpoint / "palestra.json").read_text())["instructions"] == "Be good."


@pytest.mark.parametrize(
    ("how", "task", "words"),
    [
        ({"max_steps": 3}, {}, "has 6 steps already"),
        ({"checkpoint": "5", "max_steps": 50}, {}, "no checkpoint '5'"),
        ({"max_steps": 50}, {"breaks": True}, "the environment does not start"),
    ],
)
def test_a_resume_that_fails_changes_nothing_on_disk(lab, how, task, words) -> None:
    lab.train()
    before = lab.files()
    with pytest.raises(PalestraError, match=words):
        lab.build(lab.resume(**how), **task)
    assert lab.files() == before


def test_a_run_that_has_ended_without_a_checkpoint_is_not_trained_again(lab: Lab) -> None:
    lab.set(checkpoint__every=0)
    lab.train()
    lab.folder.model.mkdir()
    before = lab.files()
    with pytest.raises(StateError, match=r"has ended and has no checkpoint, so .*--model\.name .*model"):
        lab.build(lab.resume(max_steps=50))
    assert lab.files() == before


def test_a_run_ends_where_it_is_and_is_scored_and_saved(lab: Lab) -> None:
    lab.train()
    lab.folder.report_page.unlink()
    run = lab.train(lab.resume(checkpoint="4", finish=True))
    assert run.training.state.step == 4
    assert steps(lab.folder) == [1, 2, 3, 4]
    assert lab.folder.config.train.max_steps == 4
    assert lab.evaluator.phases[-1] == "scoring after"
    assert lab.folder.report_page.is_file()
    assert lab.folder.last_checkpoint() == lab.folder.step_folder(4)


def test_a_run_goes_on_from_an_earlier_checkpoint_and_does_the_later_steps_again(lab: Lab) -> None:
    first = lab.train()
    again = lab.train(lab.resume(checkpoint="2", max_steps=5))
    assert "going on from step 2" in lab.notes.notes
    assert steps(lab.folder) == [1, 2, 3, 4, 5]
    assert again.training.learner.weight == first.training.learner.weight - 1  # type: ignore[attr-defined]
    assert [path.name for path in lab.folder.step_checkpoints()] == ["step-000002", "step-000004", "step-000005"]


def test_an_evaluation_that_was_cut_off_is_made_up(lab: Lab) -> None:
    lab.set(eval__every=2)
    lab.train()
    expected = list(lab.folder.metrics())
    kept = [row for row in expected if row["step"] <= 4 and not (row["step"] == 4 and "eval/pass_rate" in row)]
    lab.folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    lab.evaluator.phases.clear()
    lab.train(lab.resume(checkpoint="4"))
    assert "evaluating at step 4" in lab.evaluator.phases
    assert [("eval/pass_rate" in row, row["step"]) for row in lab.folder.metrics()] == [
        ("eval/pass_rate" in row, row["step"]) for row in expected
    ]


def test_the_resume_of_a_finished_run_says_how_to_take_more_steps_and_its_time_counts_all_of_it(lab: Lab) -> None:
    lab.train()
    rows = [{**row, "elapsed_seconds": 1000.0 + row["step"]} for row in lab.folder.metrics()]
    lab.folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lab.train(lab.resume())
    assert any(note.endswith("so it is only scored again; train.max_steps=12 takes more") for note in lab.notes.notes)
    lab.train(lab.resume(max_steps=7))
    report = lab.folder.report()
    assert report is not None
    assert 1006 < report["seconds"] < 1060
    assert lab.folder.metrics()[-1]["elapsed_seconds"] > 1006


def test_a_run_says_what_it_is_and_what_it_needs_before_it_starts(lab: Lab) -> None:
    lab.train()
    header = lab.notes.notes[0].splitlines()
    assert header[0] == "palestra/tiny: 2e-06 M weights, all trained, float32 on cpu"
    assert header[1] == (
        "10 cases to train on, 3 to score before and after; 6 steps of 2 × 2 rollouts, up to 32 new tokens a step"
    )
    assert header[2].startswith("needs about 1 MiB of memory besides cache and activations, and 1 MiB of disk")
    assert lab.notes.notes[1].startswith("the training may take less than a minute")
    assert lab.folder.record["steps"] == 6


class Stop(Watcher):
    """Sends SIGTERM, as `palestra runs stop` does, once the run scores or samples."""

    def phase(self, name: str, total: int) -> None:
        if name == "training":
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("on_ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background job"])
def test_a_run_from_python_saves_and_stops_at_sigterm(lab: Lab, on_ctrl_c: Any) -> None:
    before = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        lab.notes = Stop()  # type: ignore[assignment]
        with pytest.raises(Interrupted):
            lab.build().train()
        assert lab.folder.last_checkpoint() == lab.folder.step_folder(0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_folder_in_which_another_process_trains_is_refused_whatever_the_index_says(lab: Lab) -> None:
    lab.train()
    before = lab.files()
    code = f"import sys, time; from pathlib import Path; from palestra.runs.processes import hold\n\
with hold(Path({str(lab.folder.path)!r})): print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StateError, match=rf"another process \(pid {other.pid} on .*\) trains in"):
            lab.build(lab.resume(max_steps=9))
        assert lab.files().keys() == before.keys()
        assert lab.folder.config.train.max_steps == 6
    finally:
        other.kill()
        other.wait()
    lab.train(lab.resume(max_steps=7))  # the kernel gave the lock back


def test_a_run_that_cannot_be_saved_does_not_start(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_module, "free_bytes", lambda path: 10)
    with pytest.raises(ResourceError, match=r" free; .*checkpoint\.every=0"):
        lab.train()
    assert lab.evaluator.phases == []


def test_a_run_killed_between_its_model_and_its_first_checkpoint_starts_again(lab: Lab) -> None:
    lab.folder.model.mkdir()
    assert lab.train(lab.resume()).training.state.step == 6


@pytest.mark.parametrize(
    ("settings", "size", "expected"),
    [
        ({"train.learning_rate": 0.5}, 2_000_000, ["train.learning_rate = 0.5"]),
        ({"train.learning_rate": 1e-3}, 2_000_000, []),
        ({"train.learning_rate": 1e-3, "lora.r": 8}, 2_000_000, []),
        ({"train.learning_rate": 1e-2, "lora.r": 8}, 2_000_000, ["train.learning_rate = 0.01"]),
        ({"train.learning_rate": 1e-3, "lora.r": 8}, 1_000_000_000, []),
        (
            {"train.learning_rate": 1e-3, "lora.r": 8},
            7_000_000_000,
            ["train.learning_rate = 0.001 is 50 times"],
        ),
        ({"rollout.max_new_tokens": 2048}, 2_000_000, ["rollout.max_new_tokens = 2048"]),
        ({"rollout.max_new_tokens": 1024}, 2_000_000, []),
    ],
)
def test_settings_that_are_hardly_meant_are_warned_of(settings: dict[str, Any], size: int, expected: list[str]) -> None:
    warnings = list(setting_warnings(RunConfig.build(settings), size, 2048))
    assert [text[: len(start)] for text, start in zip(warnings, expected, strict=True)] == expected
