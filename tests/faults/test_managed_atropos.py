"""An unmodified atroposlib environment as a run in the background; only where its venv is already made."""

import sys
from pathlib import Path

import pytest

from palestra.core.files import cache_folder
from palestra.runs.manager import RunManager, RunRequest

DIGITS = Path(__file__).parents[2] / "benchmarks" / "atropos" / "digits_env.py"
VENV = cache_folder() / f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.skipif(not (VENV / "ready.json").exists(), reason="the venv of atroposlib is not made yet")
def test_an_atropos_environment_runs_as_three_processes_to_its_last_step(tmp_path):
    manager = RunManager(tmp_path)
    settings = {"train.max_steps": 2, "train.problems_per_step": 2, "rollout.group_size": 4}
    request = RunRequest(environment=str(DIGITS), settings=settings, env_settings={"max_token_length": 256})
    *_, run = manager.watch(manager.start(request).run_id)
    assert run.state == "completed", run.reason
    assert list(run.processes) == ["api", "trainer", "env"]
    assert [row["step"] for row in manager.metrics(run.run_id)] == [1, 2]
    assert manager.results(run.run_id)["model_path"]
