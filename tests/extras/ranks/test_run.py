"""`palestra train --nproc 2` and torchrun: it learns, it is killed, it is stopped, and other numbers of ranks go on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import wait_until

from palestra.core.run_folder import RunFolder
from palestra.runs.manager import RunManager

pytestmark = pytest.mark.slow
PALESTRA = [sys.executable, "-P", "-m", "palestra"]
SMALL = ["--eval.cases", "8", "--train.problems_per_step", "4", "--checkpoint.every", "1"]


def start(folder: Path, *words: str, launcher: list[str] = PALESTRA) -> subprocess.Popen[str]:
    command = [*launcher, "train", *words, *(["--folder", str(folder)] if "--resume" not in words else [])]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(folder: Path, *words: str, launcher: list[str] = PALESTRA) -> str:
    process = start(folder, *words, launcher=launcher)
    told = process.communicate(timeout=400)[0]
    assert process.returncode == 0, told
    return told


def pid_of_rank(rank: int, folder: Path) -> int | None:
    """The process that is this rank of the run in the folder."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
        except OSError:
            continue
        if f"\0RANK={rank}\0".encode() in b"\0" + environ and str(folder).encode() in command:
            return int(path.name)
    return None


def metrics(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).metrics() if (folder / "metrics.jsonl").is_file() else []


def row_of(folder: Path) -> Any:
    return next(run for run in RunManager().list() if Path(run.folder) == folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(folder, "--train.max_steps", "3", *SMALL)
    return folder


def test_ranks_and_torchrun_train_as_one_process_does(alone: Path, tmp_path: Path) -> None:
    steps = ["--train.max_steps", "3", *SMALL]
    told = train(tmp_path / "two", "--nproc", "2", *steps)
    assert told.count("run folder") == 2  # at the start and at the end, by the first rank
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "palestra"]
    train(tmp_path / "three", *steps, launcher=torchrun)
    for folder in (tmp_path / "two", tmp_path / "three"):
        for mine, theirs in zip(metrics(folder), metrics(alone), strict=True):
            for name in ("loss", "reward_mean", "grad_norm", "entropy", "sampled_tokens", "tokens_trained"):
                assert mine[name] == pytest.approx(theirs[name], abs=1e-3), name
        rollouts = [RunFolder(path).rollouts_file.read_text().splitlines() for path in (folder, alone)]
        assert len(rollouts[0]) == len(rollouts[1])
        ids = [[json.loads(line)["problem_id"] for line in lines] for lines in rollouts]
        assert ids[0] == ids[1]
        report = json.loads(RunFolder(folder).report_file.read_text())
        assert report
        assert row_of(folder).state == "completed"


def test_the_demo_is_learned_by_two_ranks(tmp_path: Path) -> None:
    told = train(tmp_path / "run", "--nproc", "2", "--eval.cases", "60")
    assert "Done in" in told
    rates = []
    for name in ("before", "after"):
        lines = RunFolder(tmp_path / "run").eval_file(name).read_text().splitlines()
        rates.append(sum(json.loads(line)["passed"] for line in lines) / len(lines))
    assert rates[0] < 0.5
    assert rates[1] >= 0.9


def test_a_rank_killed_by_9_ends_the_run_with_the_reason_and_any_number_of_ranks_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--nproc", "2", "--train.max_steps", "60", *SMALL)
    wait_until(lambda: len(metrics(folder)) >= 2, within_s=120, every_s=0.1)
    killed = pid_of_rank(1, folder)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    told = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + 9
    assert f"rank 1 (process {killed}) was ended by SIGKILL" in told
    assert f"rank 1 (process {killed} on " in (reason := row_of(folder).reason)
    assert "The last good checkpoint is" in reason
    assert row_of(folder).state == "failed"
    done = len(metrics(folder))
    train(folder, "--resume", str(folder), "--train.max_steps", str(done + 1))  # one process
    train(folder, "--nproc", "3", "--resume", str(folder), "--train.max_steps", str(done + 2))
    assert [row["step"] for row in metrics(folder)] == list(range(1, done + 3))


def test_runs_stop_saves_a_checkpoint_with_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "--nproc", "2", "--train.max_steps", "60", *SMALL, "--checkpoint.every", "50")
    wait_until(lambda: len(metrics(folder)) >= 2, within_s=120, every_s=0.1)
    RunManager().stop(row_of(folder).run_id)
    told = process.communicate(timeout=60)[0]
    assert process.returncode == 130, told
    assert "every finished step is saved" in told
    assert row_of(folder).state == "stopped"
    last = RunFolder(folder).last_checkpoint()
    assert last is not None
    assert int(last.name.removeprefix("step-")) == len(metrics(folder))
    assert len(list((last / "shards").glob("*.distcp"))) == 2


def test_a_checkpoint_that_lacks_a_shard_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, "--nproc", "2", "--train.max_steps", "2", *SMALL)
    last = RunFolder(folder).last_checkpoint()
    assert last is not None
    next((last / "shards").glob("*.distcp")).unlink()
    told = train(folder, "--resume", str(folder), "--train.max_steps", "3")
    assert "lacks its file shards/" in told
    assert "going on from step-000001" in told
