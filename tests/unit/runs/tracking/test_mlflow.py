"""MLflow's own client finds what a run wrote into its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow")


def test_a_run_and_its_resumption_are_one_run_in_the_folders_database(
    track: Callable[..., Any], tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    folder = tmp_path / "run"
    track(folder, ["mlflow"], range(1, 3), None)
    track(folder, ["mlflow"], range(3, 5), 2)
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("gym")
    [run] = client.search_runs([experiment.experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
    ]
    assert run.data.metrics["pass_rate/is exact_"] == 1.0  # MLflow allows no question mark
    assert run.data.params["rollout.group_size"] == "4"
    assert run.data.params["run.agent"] == "calculator"
    assert run.info.status == "FINISHED"
