"""Several runs side by side: what was set differently, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.core.errors import PalestraError
from palestra.core.yaml_config import flatten, load_yaml
from palestra.faces.charts import Point
from palestra.faces.runs_chart import chart

if TYPE_CHECKING:
    from palestra.runs.manager import Run, RunManager

_NOT_A_DIFFERENCE = ("output_dir", "track.run_name")


@dataclass(frozen=True)
class Compared:
    """One of the runs: its settings, its numbers and its curve."""

    run: Run
    settings: dict[str, Any]
    summary: dict[str, float | None]
    pass_rates: list[Point]
    rewards: list[Point]

    def to_dict(self) -> dict[str, Any]:
        head = {"run_id": self.run.run_id, "name": self.run.name, "state": self.run.state}
        return {**head, **self.summary, "settings": self.settings, "rewards": self.rewards}


def compare_runs(manager: RunManager, run_id: str) -> Compared:
    run, rows = manager.get(run_id), manager.metrics(run_id)
    trained = [row for row in rows if "reward_mean" in row]
    report = manager.results(run_id)["report"] or {}
    seconds = None if run.started is None or run.ended is None else run.ended - run.started
    summary: dict[str, float | None] = {
        "steps": trained[-1]["step"] if trained else 0,
        "reward_first": trained[0]["reward_mean"] if trained else None,
        "reward_last": trained[-1]["reward_mean"] if trained else None,
        "held_out_before": report.get("before", {}).get("pass_rate", {}).get("rate"),
        "held_out_after": report.get("after", {}).get("pass_rate", {}).get("rate"),
        "seconds": seconds,
    }
    return Compared(
        run,
        _settings(run.folder),
        summary,
        [(row["step"], row["pass_rate"]) for row in trained if "pass_rate" in row],
        [(row["step"], row["reward_mean"]) for row in trained],
    )


def differences(compared: Sequence[Compared]) -> list[str]:
    """The settings in which they are not all alike."""
    keys = dict.fromkeys(key for one in compared for key in one.settings)
    return [key for key in keys if len({repr(one.settings.get(key)) for one in compared}) > 1]


def draw(compared: Sequence[Compared]) -> str:
    """The curves of the reward as SVG."""
    curves = {f"{one.run.run_id} {one.run.name}": one.rewards for one in compared if one.rewards}
    if not curves:
        raise PalestraError("none of these runs has finished a step; there is no curve to draw yet")
    bounded = all(0 <= y <= 1 for points in curves.values() for _, y in points)
    return chart(curves, "Mean reward over steps", percent=bounded)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    flat = flatten(load_yaml(path)) if path.is_file() else {}
    return {key: value for key, value in flat.items() if key not in _NOT_A_DIFFERENCE}
