"""Several runs side by side: the settings that differ, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.core.config import flatten, load_yaml
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_path
from palestra.runs.index import id_of
from palestra.runs.reader import Run

Point = tuple[float, float]
_OWN_SETTINGS = ("output_dir", "track.run_name")  # they differ in every run


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs: its settings, results and curves."""

    run: Run
    label: str  # its id; the folder of a copy, whose id says nothing to a person
    settings: dict[str, Any]
    summary: dict[str, float | None]
    pass_rates: list[Point]
    rewards: list[Point]

    def to_dict(self) -> dict[str, Any]:
        head = {"run_id": self.run.run_id, "name": self.run.name, "state": self.run.state}
        return {**head, **self.summary, "settings": self.settings, "rewards": self.rewards}


def compared(run: Run) -> ComparedRun:
    """A run with its results, for a comparison."""
    folder, label = RunFolder(run.folder), show_path(run.folder) if run.run_id == id_of(run.folder) else run.run_id
    rows, report = folder.metrics(), folder.report() or {}
    trained = [row for row in rows if "reward_mean" in row]
    summary: dict[str, float | None] = {
        "steps": trained[-1]["step"] if trained else 0,
        "reward_first": trained[0]["reward_mean"] if trained else None,
        "reward_last": trained[-1]["reward_mean"] if trained else None,
        "held_out_before": _held_out_rate(report.get("before")),
        "held_out_after": _held_out_rate(report.get("after")),
        "seconds": None if run.started is None or run.ended is None else run.seconds,
    }
    return ComparedRun(
        run,
        label,
        settings_of(folder),
        summary,
        [(row["step"], row["pass_rate"]) for row in trained if "pass_rate" in row],
        [(row["step"], row["reward_mean"]) for row in trained],
    )


def _held_out_rate(evaluation: Any) -> float | None:
    """None where the training cases were scored, because none were held out."""
    match evaluation:
        case {"split": "train"}:
            return None
        case {"pass_rate": {"rate": int() | float() as rate}}:
            return rate
    return None


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """The settings that a run has in its config.yaml, by dotted key."""
    flat = flatten(load_yaml(folder.config_file)) if folder.config_file.is_file() else {}
    return {key: value for key, value in flat.items() if key not in _OWN_SETTINGS}


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
