"""A run that is killed anywhere goes on with the same numbers as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

STEPS = 12
ARGUMENTS = [
    "--train.max_steps", str(STEPS), "--checkpoint.every", "1", "--train.problems_per_step", "3",
    "--rollout.group_size", "4", "--eval.cases", "6", "--seed", "5",
]  # fmt: skip
# What depends on the clock or on the process, not on the run.
TIMED = ("seconds", "per_second", "per_s", "memory")


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "palestra", "train", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-2000:]


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMED)} for row in rows]


def kill_in_the_middle(process: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> None:
    """Wait for some finished steps, then a random moment more, then SIGKILL."""
    after = rng.randint(1, STEPS - 5)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        found = list(folder.glob("runs/*/metrics.jsonl"))
        if found and len(found[0].read_text().splitlines()) >= after:
            break
        time.sleep(0.02)
    time.sleep(rng.random() * 0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("adapter", [[], ["--lora.r", "4"]], ids=["full", "lora"])
def test_a_killed_and_resumed_run_equals_one_that_went_straight_through(tmp_path: Path, adapter: list[str]) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    straight.mkdir()
    broken.mkdir()
    finish(start(straight, *ARGUMENTS, *adapter))
    victim = start(broken, *ARGUMENTS, *adapter)
    kill_in_the_middle(victim, broken, random.Random(os.getpid()))
    assert len(metrics(run_of(broken))) < STEPS
    finish(start(broken, "--resume", str(run_of(broken))))

    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert_same_run(run_of(broken), run_of(straight), name)


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    straight, longer = tmp_path / "straight", tmp_path / "longer"
    straight.mkdir()
    longer.mkdir()
    constant = ["--train.scheduler", "constant"]  # others end where the run was to end
    finish(start(straight, *ARGUMENTS, *constant, "--train.max_steps", "5"))
    finish(start(longer, *ARGUMENTS, *constant, "--train.max_steps", "3"))
    run = run_of(longer)
    shorter = start(longer, "--resume", str(run), "--train.max_steps", "3")
    _, errors = shorter.communicate(timeout=100)
    assert shorter.returncode != 0
    assert b"longer, not shorter" in errors
    finish(start(longer, "--resume", str(run), "--train.max_steps", "5"))
    assert_same_run(run, run_of(straight), "model.safetensors")
    assert "max_steps: 5" in (run / "config.yaml").read_text()


def assert_same_run(one: Path, other: Path, weights: str) -> None:
    for row, expected in zip(metrics(one), metrics(other), strict=True):
        # Who shares a batch with whom depends on how fast tools answer, and the sampler's last bits on that.
        # The learner computes its own, so these two diagnostics are all that can tell.
        for name in ("kl_sampler", "sampler_gap_max"):
            assert row.pop(name, 0.0) == pytest.approx(expected.pop(name, 0.0), rel=0.02, abs=1e-4)
        assert row == expected
    mine, theirs = (load_file(run / "model" / weights) for run in (one, other))
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value.equal(theirs[key]), key
