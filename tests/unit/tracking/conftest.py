"""No tracker of a test calls home, finds a key or writes outside its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.tracking.base import Trackers
from palestra.tracking.open import open_trackers


@pytest.fixture(autouse=True)
def quiet_services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("TRACKIO_DISABLE_TELEMETRY", "1")


Track = Callable[[Path, list[str], range, "int | None"], Trackers]


@pytest.fixture
def track() -> Track:
    """Open trackers on a folder, write the loss of some steps (half the step), close."""

    def write(folder: Path, report_to: list[str], steps: range, resume_after: int | None) -> Trackers:
        folder.mkdir(exist_ok=True)
        config = RunConfig.build({"track": {"report_to": report_to, "project": "gym"}})
        trackers = open_trackers(config, RunFolder(folder), {"agent": "calculator"}, resume_after)
        for step in steps:
            trackers.metrics(step, {"loss": step / 2, "reward_mean": 0.25, "pass_rate/is exact?": 1.0})
        trackers.close()
        return trackers

    return write
