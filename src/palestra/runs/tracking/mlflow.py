"""MLflow: the server at MLFLOW_TRACKING_URI, or a database in the run folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from palestra.core.config import flatten
from palestra.core.files import write_text
from palestra.core.run_folder import RunFolder

MAX_PARAMETER_CHARS = 6000  # MLflow's own limit


class MLflowService:
    """One MLflow run; a resumed training continues it."""

    def __init__(self, folder: RunFolder, project: str, name: str, settings: Mapping[str, Any], resumed: bool) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder.mlflow_database.resolve()}")
        if resumed and folder.mlflow_id_file.exists():
            self._run_id = folder.mlflow_id_file.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(project)
        artifacts = None if uri else folder.mlflow_artifacts.resolve().as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(project, artifacts)
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
        write_text(folder.mlflow_id_file, self._run_id)
        flat = flatten(dict(settings)).items()
        params = [Param(_valid_name(key), str(value)[:MAX_PARAMETER_CHARS]) for key, value in flat]
        self._client.log_batch(self._run_id, params=params)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(_valid_name(k), float(v), now_ms, step) for k, v in row.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _valid_name(name: str) -> str:
    """MLflow refuses characters that the name of a measure may have."""
    return re.sub(r"[^\w\-./ :]", "_", name)
