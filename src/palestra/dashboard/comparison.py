"""Several runs side by side: the settings that differ, the curves, and the held-out problems that flipped."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, combinations
from typing import Any

from palestra.core.run_folder import RunFolder
from palestra.dashboard.evaluations import held_out
from palestra.dashboard.series import by_step, columns
from palestra.evals.report import pair
from palestra.runs.settings import differing_keys, settings_of

_CURVES = ("reward_mean", "pass_rate", "eval/pass_rate", "entropy", "completion_length_mean", "tool_calls_mean")


def compare(folders: Mapping[str, RunFolder]) -> dict[str, Any]:
    """Of each run by its id: what `GET api/compare` answers."""
    settings = {run: settings_of(folder) for run, folder in folders.items()}
    return {
        "settings": [
            {"key": key, "values": {run: found.get(key) for run, found in settings.items()}}
            for key in differing_keys([*settings.values()])
        ],
        "curves": {run: _curves(folder) for run, folder in folders.items()},
        "evaluations": {run: _rates(folder) for run, folder in folders.items()},
        "flips": _flips(folders),
    }


def _curves(folder: RunFolder) -> dict[str, Any]:
    """By step, by the tokens sampled so far, and by the seconds that had passed."""
    rows = by_step(folder.metrics())
    made = columns(rows)
    step_s = (row.get("sample_seconds", 0.0) + row.get("train_seconds", 0.0) for row in rows)
    seconds = [row.get("elapsed_seconds", total) for row, total in zip(rows, accumulate(step_s), strict=True)]
    return {
        "step": made["step"],
        "tokens": list(accumulate(row.get("sampled_tokens", 0.0) for row in rows)),
        "seconds": seconds,
        "series": {name: values for name, values in made["series"].items() if name in _CURVES},
    }


def _rates(folder: RunFolder) -> dict[str, Any]:
    report = folder.report() or {}
    return {name: report[name]["pass_rate"] for name in ("before", "after") if report.get(name)}


def _flips(folders: Mapping[str, RunFolder]) -> list[dict[str, Any]]:
    """Held-out problems after training, of each pair of runs that share some."""
    passed = {run: after for run, folder in folders.items() if (after := held_out(folder)) is not None}
    rows = []
    for a, b in combinations(passed, 2):
        found = pair(passed[a], passed[b])
        if found.both + found.only_first + found.only_second + found.neither:
            counts = {"both": found.both, "only_a": found.only_first, "only_b": found.only_second}
            rows.append({"a": a, "b": b, **counts, "neither": found.neither, "p_value": found.p_value})
    return rows
