"""Which trackers a run gets, and what happens when one is missing or fails."""

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from trackers import track

from palestra.core.config import RunConfig
from palestra.core.errors import MissingPackageError
from palestra.core.run_folder import RunFolder
from palestra.runs.tracking import (
    MAX_CONSECUTIVE_FAILURES,
    GuardedTracker,
    JsonlTracker,
    check_trackers,
    open_trackers,
)


def test_metrics_jsonl_is_always_written(tmp_path: Path) -> None:
    track(tmp_path / "run", [], range(1, 3), None)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [0.5, 1.0]


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, tmp_path, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.delitem(sys.modules, f"palestra.runs.tracking.{name}", raising=False)
    config = RunConfig.build({"track": {"report_to": [name]}})
    with pytest.raises(MissingPackageError, match=rf"pip install 'palestra\[{name}\]'"):
        open_trackers(config, RunFolder(tmp_path), {}, None)


class Flaky:
    """A service that fails on the steps it is told to."""

    def __init__(self, failing: range) -> None:
        self.failing = failing
        self.calls: list[int] = []

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self.calls.append(step)
        if step in self.failing:
            raise ConnectionError("the service is down")

    def close(self) -> None:
        raise ConnectionError("still down")


def test_a_service_that_cannot_start_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.runs.tracking.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"needs a package that is not installed .*palestra\[mlflow\]"):
        check_trackers(RunConfig.build({"track.report_to": ["mlflow"]}).track)
    check_trackers(RunConfig.build({}).track)


def test_a_tracker_that_fails_warns_once_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = Flaky(range(2, 4))
    trackers = JsonlTracker(RunFolder(tmp_path), services=[GuardedTracker("flaky", service)])
    with caplog.at_level(logging.WARNING, logger="palestra"):
        for step in range(1, 6):
            trackers.metrics(step, {"loss": 1.0})
        trackers.close()
    assert [r.message for r in caplog.records] == [
        "flaky failed (ConnectionError: the service is down); the run goes on, and metrics.jsonl has every number"
    ]
    assert service.calls == [1, 2, 3, 4, 5]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    down = Flaky(range(1, 100))
    guarded = GuardedTracker("flaky", down)
    for step in range(1, 20):
        guarded.metrics(step, {"loss": 1.0})
    assert len(down.calls) == MAX_CONSECUTIVE_FAILURES, "one that stays down is left alone"
