"""Trackio's own reader finds what a run wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio")

# Trackio fixes its folder when it is imported, so it runs in a process of its own.
SCRIPT = """
from pathlib import Path
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs.tracking.open import open_trackers

config = RunConfig.build({"track": {"report_to": ["trackio"], "project": "gym", "run_name": "first"}})
for steps, resume_after in ((range(1, 3), None), (range(3, 5), 2)):
    trackers = open_trackers(config, RunFolder(Path(".")), {"agent": "calculator"}, resume_after)
    for step in steps:
        trackers.metrics(step, {"loss": step / 2})
    trackers.close()
"""


def test_a_run_and_its_resumption_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", "from trackio.cli import main; main()", "get", "metric", "--json"]
    command += ["--project", "gym", "--run", "first", "--metric", "loss"]
    read = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert read.returncode == 0, read.stderr
    values = json.loads(read.stdout)["values"]
    assert [(v["step"], v["value"]) for v in values] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
