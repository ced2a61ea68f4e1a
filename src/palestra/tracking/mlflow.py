"""MLflow: the server of MLFLOW_TRACKING_URI, or a database in the run folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from palestra.core.files import write_text

RUN_ID_FILE = "mlflow_run_id"
LONGEST_PARAMETER = 6000  # MLflow's own limit


class MLflowService:
    """One MLflow run; a resumed training goes on with the same one."""

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any], resumed: bool) -> None:
        folder = folder.resolve()
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        stored = folder / RUN_ID_FILE
        if resumed and stored.exists():
            self._run_id = stored.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(project)
        artifacts = None if uri else (folder / "mlflow_artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(project, artifacts)
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
        write_text(stored, self._run_id)
        self._client.log_batch(self._run_id, params=[Param(k, v[:LONGEST_PARAMETER]) for k, v in _flat(settings)])

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(_allowed(k), float(v), now_ms, step) for k, v in row.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield _allowed(f"{prefix}{key}"), str(value)


def _allowed(name: str) -> str:
    """MLflow refuses other characters in names, as a measure may have."""
    return re.sub(r"[^\w\-./ :]", "_", name)
