"""kill -9 of the Tinker server in the middle of a step: the run goes on, with the numbers of one left alone."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker")

from palestra import Env
from palestra.core.config import RunConfig
from palestra.core.http import HttpError, Request
from palestra.core.run_folder import Resume
from palestra.env_api import train_env
from palestra.envs.running import RunningEnv
from palestra.extras.tinker.client.learner import TinkerLearner, TinkerPolicy

pytestmark = pytest.mark.slow("make test-tinker restarts servers")


class Server:
    """`palestra tinker` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["-m", "palestra", "tinker", "palestra/tiny", "--port", self.port, "--output_dir", self.folder]
        self.process = subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.DEVNULL)

    def wait(self) -> None:
        for _ in range(600):
            try:
                if Request(f"{self.url}/api/v1/healthz", timeout_s=5).send().status == 200:
                    return
            except HttpError:
                time.sleep(0.2)
        pytest.fail("the server did not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_and_start(self) -> None:
        self.kill()
        self.start()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        patch.setenv("PALESTRA_HOME", str(made.folder / "home"))
        made.start()
        made.wait()
        yield made
    made.kill()


class Letters(Env):
    """Say a letter often."""

    instructions = "Answer in a word."

    def problems(self, split: str) -> list[tuple[str, str]]:
        return [("Say something.", "a"), ("Count to three.", "o"), ("Who are you?", "s"), ("What is this?", "n")]

    def score(self, answer: str) -> float:
        return min(answer.count(self.problem.expect) / 4, 1.0)


def config(server: Server, folder: Path, steps: int = 4) -> RunConfig:
    return RunConfig.build(
        {
            "backend": "tinker",
            "tinker": {"base_url": server.url},
            "output_dir": str(folder),
            "model": {"name": "palestra/tiny"},
            "lora": {"r": 4},
            "train": {"max_steps": steps, "problems_per_step": 2, "learning_rate": 1e-3, "loss": "cispo"},
            "rollout": {"group_size": 4, "max_new_tokens": 12, "max_tool_rounds": 0},
            "eval": {"cases": 1},
            "checkpoint": {"every": 2},
        },
        {"train": {"mask_truncated": False, "filter_equal_groups": False}},
    )


NAMES = ("loss", "grad_norm", "reward_mean", "sampled_tokens")


def rows(result: Any) -> list[list[float]]:
    return [[row[name] for name in NAMES] for row in result.metrics]


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return rows(train_env(RunningEnv(Letters()), config(server, tmp_path_factory.mktemp("runs"))))


@pytest.mark.parametrize("moment", ["gradients", "sampling"])
def test_a_run_goes_on_after_kill_9_of_its_server(moment, server, undisturbed, tmp_path, monkeypatch):
    owner, name = (TinkerLearner, "_send") if moment == "gradients" else (TinkerPolicy, "update")
    original, calls = getattr(owner, name), []

    def disturbed(*arguments: Any) -> Any:
        found = original(*arguments)
        calls.append(name)
        if len(calls) == 3:  # the gradients of step 3 are on their way, or its first rollouts will be
            server.kill_and_start()
        return found

    monkeypatch.setattr(owner, name, disturbed)
    result = train_env(RunningEnv(Letters()), config(server, tmp_path))
    assert len(calls) >= 3
    for row, expected in zip(rows(result), undisturbed, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_a_run_is_resumed_on_a_server_that_was_restarted(server, undisturbed, tmp_path):
    first = train_env(RunningEnv(Letters()), config(server, tmp_path, steps=2))
    server.kill_and_start()
    server.wait()
    going_on = Resume(first.run.path, max_steps=4)
    result = train_env(RunningEnv(Letters()), first.run.config, resume=going_on)
    for row, expected in zip(rows(result), undisturbed, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
