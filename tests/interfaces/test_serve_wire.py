"""The whole wire: an environment process of its own, the trajectory API, `palestra train --env-url`."""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from palestra.extras.atropos.runs import new_wire_run
from palestra.runs.request import RunRequest

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
TRAINER = ["--model.name", "palestra/tiny", "--rollout.group_size", "4", "--train.problems_per_step", "2"]


@pytest.fixture
def api(forkserver, tmp_path) -> Iterator[str]:
    words = ("trajectory", "--port", "0", "--folder", str(tmp_path / "wire"))
    process = forkserver.popen(
        "-m", "palestra", *words, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
    )
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.terminate()
    process.wait(20)


class Environment(threading.Thread):
    """A small environment that speaks the protocol: the more digits in an answer, the better.

    It leaves logprobs out of every other group, and posts one group that no model can train. It pauses after
    `groups` groups until `go_on` is set.
    """

    def __init__(self, api: str, inference: str, groups: int) -> None:
        super().__init__(daemon=True)
        self.api, self.inference = httpx.Client(base_url=api, timeout=60), httpx.Client(base_url=inference, timeout=60)
        self.groups, self.go_on, self.done = groups, threading.Event(), threading.Event()

    def run(self) -> None:
        me = {"max_token_length": 64, "desired_name": "digits", "weight": 1.0, "group_size": 4}
        while (answer := self.api.post("/register-env", json=me).json())["status"] != "success":
            time.sleep(0.1)
        self.post([[10**6, 1]] * 4, [[-100, 1]] * 4, [0.0, 1.0, 0.0, 1.0], None, answer["env_id"])
        number = 0
        while not self.done.is_set():
            with contextlib.suppress(httpx.TransportError):  # the trainer is away, and its server with it
                if number + 1 == self.groups:
                    self.go_on.wait()
                if self.api.get("/status").json()["queue_size"] < 5:
                    self.attempt(number, answer["env_id"])
                    number += 1
            time.sleep(0.05)

    def attempt(self, number: int, env_id: int) -> None:
        prompt = [5 + number % 20, 6, 7, 8]
        sampling = {"n": 4, "temperature": 1.0, "max_new_tokens": 12}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = self.inference.post("/generate", json=body)
        if answer.status_code == 503:  # the trainer ends, and its server a moment later
            raise httpx.TransportError(answer.text)
        results = answer.json()
        rows = [result["meta_info"]["output_token_logprobs"] for result in results]
        tokens = [prompt + [i for _, i, _ in row] for row in rows]
        masks = [[-100] * len(prompt) + [i for _, i, _ in row] for row in rows]
        logprobs = [[1.0] * len(prompt) + [p for p, _, _ in row] for row in rows]
        scores = [sum(c.isdigit() for c in result["text"]) / 12 for result in results]
        self.post(tokens, masks, scores, logprobs if number % 2 else None, env_id)

    def post(self, tokens, masks, scores, logprobs, env_id) -> None:
        body = {"tokens": tokens, "masks": masks, "scores": scores, "inference_logprobs": logprobs, "env_id": env_id}
        assert self.api.post("/scored_data", json=body).status_code == 200


def start(forkserver, folder: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    """A trainer, and where its model is served."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ("-m", "palestra", "train", *words, "--json")
    process = forkserver.popen(*command, cwd=folder, **pipes, text=True, env=os.environ | ENVIRONMENT)
    assert process.stderr is not None
    for line in process.stderr:
        if "environments sample from" in line:
            return process, line.split()[-1].removesuffix("/v1")
    raise AssertionError(process.communicate())


def steps(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_only_an_environment_of_ours_is_scored_by_the_trainer(monkeypatch, tmp_path):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    settings = {"train.max_steps": 3, "output_dir": str(tmp_path)}
    shared = {"env_url": "http://127.0.0.1:8001", "env_settings": {"held_out_size": "2"}, "settings": settings}

    def record_of(env: str | None) -> dict:
        return new_wire_run(RunRequest(environment=env, **shared)).record

    ours = str(root / "examples" / "my_first_env.py")
    record = record_of("examples/my_first_env.py")
    assert record["scored_by"] == {"name": ours, "settings": {"held_out_size": "2"}}
    assert record["env_url"] == "http://127.0.0.1:8001"
    assert "scored_by" not in record_of("benchmarks/atropos/digits_env.py")
    assert "scored_by" not in record_of(None)


def tokens_of(run: Path, step: int) -> list[list[int]]:
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [[i for turn in row["turns"] for i in turn["token_ids"]] for row in lines if row["step"] == step]


def test_training_over_the_wire_goes_on_after_kill_9_and_ends_with_a_model(api, cli, tmp_path, forkserver):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    wire = ["--env-url", api, "--serve-port", port]
    more = ("--train.max_steps", "5", "--checkpoint.every", "2")
    trainer, inference = start(forkserver, tmp_path, *wire, *TRAINER, *more)
    environment = Environment(api, inference, groups=6)  # three batches
    environment.start()
    (run,) = (tmp_path / "runs").iterdir()
    while len(steps(run)) < 3:
        assert trainer.poll() is None, trainer.communicate()
        time.sleep(0.05)
    trainer.kill()
    _, said = trainer.communicate()
    first_life = steps(run)[2], tokens_of(run, 3)  # the checkpoint is of step 2
    environment.go_on.set()
    resumed = cli("train", *wire, "--resume", str(run), "--json")
    environment.done.set()
    assert resumed.code == 0, resumed.err
    summary = json.loads(resumed.out.splitlines()[-1])
    assert summary["steps"] == 5
    rows = steps(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["tokens_trained"] > 0 for row in rows)
    assert (run / "model" / "model.safetensors").exists()
    assert "cannot be trained: token id 1000000" in said
    assert tokens_of(run, 3) == first_life[1], "the batch since the checkpoint came again"
    for name in ("loss", "grad_norm", "reward_mean", "ratio_max", "staleness_max"):
        assert rows[2][name] == first_life[0][name], f"{name} of the repeated step"
    assert httpx.get(f"{api}/status").json()["current_step"] == 5
    assert_nothing_was_evaluated(run, summary)


def assert_nothing_was_evaluated(run: Path, summary: dict) -> None:
    """The trainer knows nothing of this environment, so it has no held-out problems to score."""
    report = json.loads((run / "report.json").read_text())
    assert (report["before"], report["after"]) == (None, None)
    assert not list(run.glob("evals/*"))
    assert "held_out_before" not in summary
    assert not any("eval/pass_rate" in row for row in steps(run))
    assert summary["report"].endswith(f"{run.name}/report.html")
    assert "There was no held-out evaluation" in (run / "report.html").read_text()
