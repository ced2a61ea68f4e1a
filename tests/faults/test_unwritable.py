"""A disk that takes no more, a folder that is deleted, a terminal that is closed: one sentence, and no step is lost."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from palestra.cli.find_run import is_own
from palestra.core.run_folder import RunFolder, step_of

STEPS = 5
ARGUMENTS = [
    "--train.max_steps", str(STEPS), "--train.problems_per_step", "2", "--rollout.group_size", "4", "--eval.cases", "2",
    "--seed", "5", "--checkpoint.keep_last", "9",
]  # fmt: skip
# `palestra train`, which runs a piece of code after some of its steps, before they are saved
SCRIPT = """
import json, os, resource, shutil, signal, sys, tempfile
from pathlib import Path
from palestra.cli.main import run
from palestra.train.loop import Training
after, step, folder = json.loads(sys.argv[1]), Training.step, Path(sys.argv[2])

tempfile.tempdir = None  # it forgets the forkserver's TMPDIR

def limit(size=resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def broken(training):
    metrics = step(training)
    exec(after.get(str(training.state.step), ""))
    return metrics

Training.step = broken
sys.exit(run(["train", *sys.argv[3:]]))
"""
SMALLER_THAN_A_CHECKPOINT, SMALLER_THAN_A_MODEL = "limit(4_000_000)", "limit(1_000_000)"
# files where folders are to be made: there, not even root can write
BLOCK = "(folder / '.model.partial').touch(); shutil.rmtree(folder / 'checkpoints'); (folder / 'checkpoints').touch()"


def train(forkserver: Any, folder: Path, after: dict[int, str], *arguments: str, **options: Any) -> SimpleNamespace:
    """A training in a child: its exit code, and what it printed, in one line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "2000"}
    arguments = arguments if "--resume" in arguments else (*ARGUMENTS, "--folder", str(folder), *arguments)
    options = {"env": env, "cwd": folder.parent} | options
    done = forkserver.run("-c", SCRIPT, json.dumps(after), str(folder), *arguments, **options)
    text = " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in text, done.stdout + done.stderr
    return SimpleNamespace(code=done.returncode, text=text)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(mine: Path, theirs: Path) -> None:
    ours, others = weights(mine), weights(theirs)
    assert ours.keys() == others.keys()
    assert all(tensor.equal(others[name]) for name, tensor in ours.items())


def saved(folder: Path) -> list[int]:
    return [step_of(path) for path in RunFolder(folder).step_checkpoints()]


@pytest.fixture(scope="module")
def straight(forkserver, tmp_path_factory) -> Path:
    """The model of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert train(forkserver, folder, {}, "--checkpoint.every", "0").code == 0
    return folder / "model"


def test_a_run_whose_checkpoints_cannot_be_written_warns_and_tries_again(forkserver, tmp_path, straight) -> None:
    folder = tmp_path / "run"
    after = {2: SMALLER_THAN_A_CHECKPOINT, 4: "limit()"}
    done = train(forkserver, folder, after, "--checkpoint.every", "1")
    assert done.code == 0, done.text
    assert saved(folder) == [1, 4, 5]
    assert re.findall(r"after step (\d): the checkpoint \S+ could not be written \((.*?)\)", done.text) == [
        ("2", "File too large"),
        ("3", "File too large"),
    ]
    assert not list((folder / "checkpoints").glob(".*"))
    assert_equal(folder / "model", straight)


@pytest.mark.slow("make test-slow runs the trainings of each kind of failure")
def test_a_run_that_is_killed_after_failed_checkpoints_resumes_from_the_last_good_one(
    forkserver, tmp_path, straight
) -> None:
    folder = tmp_path / "run"
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    after = {2: SMALLER_THAN_A_CHECKPOINT, 4: kill}
    assert train(forkserver, folder, after, "--checkpoint.every", "1").code == -signal.SIGKILL
    assert saved(folder) == [1]
    assert train(forkserver, folder, {}, "--resume", str(folder)).code == 0
    assert saved(folder) == [1, 2, 3, 4, 5]
    assert [row["step"] for row in RunFolder(folder).metrics()] == list(range(1, STEPS + 1))
    assert_equal(folder / "model", straight)


@pytest.mark.slow("make test-slow runs the trainings of each kind of failure")
def test_stages_go_on_without_their_last_checkpoint_and_a_resume_repeats_what_was_not_saved(
    forkserver, tmp_path
) -> None:
    options = ["--stages.plan", "rft,grpo", "--stages.rft_rounds", "1", "--stages.rft_pass", "32"]
    options += ["--checkpoint.every", "2"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(forkserver, whole, {}, *options).code == 0
    stages = RunFolder(whole).record["stages"]
    first, last = stages[0]["last_step"], stages[1]["last_step"]
    assert 0 < first < last
    assert first in saved(whole)
    after = {first: SMALLER_THAN_A_MODEL, first + 1: "os.kill(os.getpid(), signal.SIGKILL)"}
    assert train(forkserver, broken, after, *options).code == -signal.SIGKILL
    assert first not in saved(broken)
    assert train(forkserver, broken, {}, "--resume", str(broken)).code == 0
    assert saved(broken)[-1] == last
    assert_equal(broken / "model", whole / "model")


def test_weights_that_the_run_folder_cannot_hold_are_saved_elsewhere_before_the_process_ends(
    forkserver, tmp_path, straight
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(elsewhere), "COLUMNS": "2000"}
    done = train(forkserver, folder, {3: BLOCK}, "--checkpoint.every", "2", env=env)
    assert done.code == 2
    assert "step 6" not in done.text
    assert "--output_dir" in done.text
    [model] = elsewhere.glob("palestra-model-*/model")
    assert str(model) in done.text
    assert model.parent.stat().st_mode & 0o077 == 0
    assert_equal(model, straight)

    (folder / "checkpoints").unlink()
    (folder / ".model.partial").unlink()
    assert train(forkserver, folder, {}, "--resume", str(folder)).code == 0
    assert_equal(folder / "model", straight)


def test_a_model_that_cannot_be_written_anywhere_is_one_sentence_with_the_right_step(forkserver, tmp_path) -> None:
    folder = tmp_path / "run"
    done = train(forkserver, folder, {STEPS: SMALLER_THAN_A_MODEL}, "--checkpoint.every", "0")
    assert done.code == 2
    assert f"step {STEPS + 1}" not in done.text
    assert "elsewhere either" in done.text


@pytest.mark.slow("make test-slow runs the trainings of each kind of failure")
def test_a_final_model_that_cannot_be_written_is_in_the_last_checkpoint(forkserver, tmp_path, straight) -> None:
    folder = tmp_path / "run"
    done = train(forkserver, folder, {3: "(folder / '.model.partial').touch()"}, "--checkpoint.every", "2")
    assert done.code == 2
    assert saved(folder) == [2, 4, 5]
    assert f"The last good checkpoint is {folder / 'checkpoints' / 'step-000005'}" in done.text
    assert_equal(folder / "checkpoints" / "step-000005", straight)


@pytest.mark.slow("make test-slow runs the trainings of each kind of failure")
def test_a_run_that_cannot_save_when_it_is_stopped_names_the_last_good_checkpoint(forkserver, tmp_path) -> None:
    folder = tmp_path / "run"
    stop = f"{SMALLER_THAN_A_CHECKPOINT}; os.kill(os.getpid(), signal.SIGINT)"
    done = train(forkserver, folder, {3: stop}, "--checkpoint.every", "2")
    assert done.code == 2
    assert "step-000003 could not be written" in done.text
    assert saved(folder) == [2]


def test_a_run_folder_that_is_deleted_during_the_training_is_one_sentence(forkserver, tmp_path) -> None:
    folder = tmp_path / "run"
    # in one moment: a thread that writes records would else put a file into what is being deleted
    delete = "shutil.rmtree(folder.rename(folder.with_name('gone')))"
    done = train(forkserver, folder, {2: delete}, "--checkpoint.every", "1")
    assert done.code == 2
    assert done.text.count("Error:") == 1
    assert "was deleted or moved" in done.text
    assert not folder.exists()


@pytest.mark.slow("make test-slow runs the trainings of each kind of failure")
def test_a_run_whose_working_directory_is_deleted_trains_to_its_end(forkserver, tmp_path) -> None:
    working = tmp_path / "working"
    working.mkdir()
    folder = tmp_path / "run"
    done = train(forkserver, folder, {2: "shutil.rmtree(os.getcwd())"}, "--checkpoint.every", "2", cwd=working)
    assert done.code == 0, done.text
    assert saved(folder) == [2, 4, 5]


def test_sighup_saves_the_last_step_as_sigterm_does(forkserver, tmp_path) -> None:
    folder = tmp_path / "run"
    hang_up = {3: "os.kill(os.getpid(), signal.SIGHUP)"}
    done = train(forkserver, folder, hang_up, "--checkpoint.every", "0")
    assert done.code == 130
    assert saved(folder) in ([3], [4])  # it waits for the end of a step that learns


KILLED_EARLY = """
import os, signal, sys
from palestra.cli.main import run
from palestra.train import run as runs
runs.backend_of = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
run(["train", *sys.argv[1:]])
"""


def test_a_run_that_is_killed_before_its_first_step_is_resumed_without_trust(forkserver, tmp_path) -> None:
    folder = tmp_path / "run"
    done = forkserver.run("-c", KILLED_EARLY, *ARGUMENTS, "--folder", str(folder), cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert is_own(RunFolder(folder))
    assert train(forkserver, folder, {}, "--resume", str(folder)).code == 0


def test_a_dry_run_lists_no_run(forkserver, tmp_path) -> None:
    home = tmp_path / "home"
    env = {**os.environ, "PALESTRA_HOME": str(home)}
    done = forkserver.run("-m", "palestra", "train", *ARGUMENTS, "--dry-run", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    done = forkserver.run("-m", "palestra", "runs", "list", "--json", cwd=tmp_path, env=env)
    assert json.loads(done.stdout)["runs"] == []
