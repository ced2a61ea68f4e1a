"""The own reader of each tracking service finds what a run wrote. tests/interfaces/test_wandb_sync.py has W&B's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trackers import attempts, track

from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.run_folder import RunFolder
from palestra.runs.tracking import open_trackers

LOSSES = [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]  # of `track`, by step
# Trackio fixes its folder when it is imported, so it runs in a process of its own.
TRACKIO = """
from pathlib import Path
from trackers import attempts
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs.tracking import open_trackers

config = RunConfig.build({"track": {"report_to": ["trackio"], "project": "gym", "run_name": "first"}})
for steps, resume_after in ((range(1, 3), None), (range(3, 5), 2)):
    trackers = open_trackers(config, RunFolder(Path(".")), {"agent": "calculator"}, resume_after)
    for step in steps:
        trackers.rollouts(step, attempts())
        trackers.metrics(step, {"loss": step / 2})
    trackers.close()
"""
# Tables of a run, by step.
READ_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("gym", "first")
print(json.dumps([(row["step"], row["transcripts"]["_value"]) for row in rows if row.get("transcripts")]))
"""


def test_wandb_online_without_a_key_is_refused_and_a_stored_login_counts_as_one(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from palestra.runs.tracking import needs_wandb_key

    with pytest.raises(SettingError, match="WANDB_API_KEY"):
        open_trackers(RunConfig.build({"track.report_to": ["wandb"]}), RunFolder(tmp_path), {}, None)
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not needs_wandb_key()


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track(tmp_path / "run", ["tensorboard"], range(1, 5), None)
    track(tmp_path / "run", ["tensorboard"], range(3, 5), 2)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {"loss", "reward_mean", "pass_rate/is exact?"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == LOSSES


def test_trackio_has_a_run_and_its_resumption_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    read = ["from trackio.cli import main; main()", "get", "metric", "--json", "--project", "gym"]
    read += ["--run", "first", "--metric", "loss"]
    for words in ([TRACKIO], read):
        command = [sys.executable, "-c", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert [(value["step"], value["value"]) for value in json.loads(done.stdout)["values"]] == LOSSES
    rows = subprocess.run([sys.executable, "-c", READ_TRACKIO], cwd=tmp_path, capture_output=True, text=True)
    assert rows.returncode == 0, rows.stderr
    [(step, table)] = json.loads(rows.stdout)
    assert step == 1
    assert [row["passed"] for row in table] == [True, False]
    assert "calls add(a=1, b=2)" in table[0]["transcript"]


def test_wandb_has_a_table_of_transcripts_for_the_first_step_and_every_tenth(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = RunConfig.build({"track.report_to": ["wandb"]})
    opened = open_trackers(config, RunFolder(tmp_path), {}, None)
    for step in range(1, 12):
        opened.rollouts(step, attempts())
        opened.metrics(step, {"loss": 1.0})
    opened.close()
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(table["data"][0][0] for table in tables) == [1, 10]
    first = dict(zip(tables[0]["columns"], tables[0]["data"][0], strict=True))
    assert (first["reward"], first["question"], first["reasons"]) == (1.0, "What is 1 + 2?", "right: 1 right")
    assert first["transcript"] == "assistant: \n  calls add(a=1, b=2)\ntool: 3\nassistant: It is 3."


def test_mlflow_has_a_run_and_its_resumption_as_one(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "run"
    track(folder, ["mlflow"], range(1, 3), None)
    track(folder, ["mlflow"], range(3, 5), 2)
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("gym").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == LOSSES
    assert run.data.metrics["pass_rate/is exact_"] == 1.0  # MLflow allows no question mark
    assert (run.data.params["rollout.group_size"], run.data.params["run.agent"]) == ("4", "calculator")
    assert run.info.status == "FINISHED"
