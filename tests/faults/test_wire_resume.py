"""A trainer over the wire that is killed goes on with the same batches, to the same weights and metrics."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from forkserver import Forkserver
from safetensors.torch import load_file

from palestra.core.run_folder import RunFolder
from palestra.extras.atropos.protocol import WireClient

STEPS, GROUPS_PER_STEP, SIBLINGS = 4, 2, 4
TIMED = ("seconds", "per_second", "per_s", "memory")


@contextmanager
def trajectory_api(forkserver: Forkserver, folder: Path) -> Iterator[str]:
    words = ("trajectory", "--port", "0", "--folder", str(folder))
    process = forkserver.popen("-m", "palestra", *words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(20)


def post_all_groups(url: str) -> None:
    """What an environment would post in the course of the run, all at once, and the same each time."""
    rng, client = random.Random(3), WireClient(url, give_up_s=20)
    for number in range(STEPS * GROUPS_PER_STEP):
        prompt = [rng.randrange(5, 500) for _ in range(6)]
        answers = [[rng.randrange(5, 500) for _ in range(4 + i)] for i in range(SIBLINGS)]
        body = {
            "tokens": [prompt + answer for answer in answers],
            "masks": [[-100] * 6 + answer for answer in answers],
            "inference_logprobs": [[1.0] * 6 + [-2.0 - rng.random() for _ in answer] for answer in answers],
            "scores": [float(i % 2) for i in range(SIBLINGS)],
        }
        asyncio.run(client.call("/scored_data", body, key=f"group-{number}"))


def trainer(forkserver: Forkserver, url: str, folder: Path, *more: str) -> subprocess.Popen[bytes]:
    settings = {
        "model.name": "palestra/tiny",
        "train.max_steps": STEPS,
        "train.problems_per_step": GROUPS_PER_STEP,
        "train.learning_rate": 1e-3,
        "rollout.group_size": SIBLINGS,
        "checkpoint.every": 2,
    }
    options = [] if more else [f"--{key}={value}" for key, value in settings.items()] + ["--folder", str(folder)]
    words = ("train", "--env-url", url, "--serve-port", "0", *options, *more)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return forkserver.popen("-m", "palestra", *words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_after(process: subprocess.Popen[bytes], folder: RunFolder, steps: int) -> None:
    deadline = time.monotonic() + 120
    while len(folder.metrics()) < steps:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def numbers(folder: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMED)} for row in folder.metrics()]


def test_a_killed_trainer_over_the_wire_equals_one_that_went_straight_through(forkserver, tmp_path):
    straight, broken = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "broken")
    with (
        trajectory_api(forkserver, tmp_path / "api-1") as url,
        trajectory_api(forkserver, tmp_path / "api-2") as other_url,
    ):
        post_all_groups(url)
        whole = trainer(forkserver, url, straight.path)  # at the same time as the other
        post_all_groups(other_url)
        kill_after(trainer(forkserver, other_url, broken.path), broken, steps=3)  # one step beyond its last checkpoint
        assert trainer(forkserver, other_url, broken.path, "--resume", str(broken.path)).wait(240) == 0
        assert whole.wait(240) == 0
    assert len(numbers(straight)) == STEPS
    assert numbers(broken) == numbers(straight)
    weights = [load_file(run.model / "model.safetensors") for run in (straight, broken)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
