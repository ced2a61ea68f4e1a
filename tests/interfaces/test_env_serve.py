"""`palestra env serve`: one of our environments as a program of its own, feeding `palestra train --env-url`."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PALESTRA = [sys.executable, "-c", "from palestra.cli.main import main; main()"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_first_env.py"
SHAPE = ["--rollout.group_size", "4", "--train.problems_per_step", "2"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PALESTRA, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | ENVIRONMENT,
    )


@pytest.fixture
def api(tmp_path) -> Iterator[subprocess.Popen[str]]:
    process = start(tmp_path, "trajectory", "--port", "0", "--folder", "wire")
    yield process
    process.terminate()
    process.communicate(timeout=20)


@pytest.mark.slow
def test_an_environment_started_before_its_trainer_feeds_it_to_the_last_step(api, cli, tmp_path):
    url = api.stdout.readline().split()[-1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    model = f"http://127.0.0.1:{port}/v1"
    served = start(
        tmp_path, "env", "serve", str(EXAMPLE), "--api-url", url, "--openai.base_url", model, *SHAPE, "--json"
    )
    wire = ["--env-url", url, "--serve-port", port, "--model.name", "palestra/tiny", "--train.max_steps", "2"]
    scored = ["--env", str(EXAMPLE), "--env.held_out_size", "3", "--eval.every", "1", "--json"]
    trainer = cli.ok("train", *wire, *SHAPE, *scored)
    out, err = served.communicate(timeout=20)
    assert served.returncode == 0, err
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, second = (row for row in rows if "loss" in row)
    assert first["tokens_trained"] > 0
    assert second["tokens_trained"] > 0
    assert first["sampler_gap_max"] < 1e-4
    assert json.loads(out.splitlines()[-1])["groups"] >= 4
    assert "waits until a trainer has started" in err
    assert "the trainer has all the groups that it asked for" in err
    assert_evaluated(run, json.loads(trainer.out.splitlines()[-1]), rows)


def assert_evaluated(run: Path, summary: dict, rows: list[dict]) -> None:
    """An environment of ours scores the model where it is trained, too: before, between and after."""
    report = json.loads((run / "report.json").read_text())
    for when in ("before", "after"):
        attempts = [json.loads(line) for line in (run / "evals" / f"{when}.jsonl").read_text().splitlines()]
        assert len(attempts) == report[when]["pass_rate"]["n"] == 3
        assert sum(attempt["passed"] for attempt in attempts) / 3 == pytest.approx(report[when]["pass_rate"]["rate"])
        assert summary[f"held_out_{when}"] == report[when]["pass_rate"]["rate"]
    assert [row["step"] for row in rows if "eval/pass_rate" in row] == [1]
    assert summary["steps"] == 2
    assert summary["report"].endswith(f"{run.name}/report.html")
    assert "held-out attempts pass, before and after training" in (run / "report.html").read_text()
    assert report["changes"]
