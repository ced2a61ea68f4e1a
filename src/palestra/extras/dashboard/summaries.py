"""A run as the pages show it: a line of the list, and everything about one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.core.config import RunConfig, flatten
from palestra.core.errors import PalestraError
from palestra.core.files import folder_size, read_regular
from palestra.core.run_folder import RunFolder, step_of
from palestra.evals.findings import recorded_findings
from palestra.extras.dashboard.catalog import CatalogRun
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.extras.dashboard.series import by_step, sparkline

_MAX_CACHED = 512
_INDEX_WITHIN_S = 0.4  # of a request, for bringing the index of rollouts up to date


def _sparkline(folder: RunFolder) -> list[float]:
    """The reward curve in the list of runs; read again when the metrics have changed."""
    try:
        stat = folder.metrics_file.stat()
    except OSError:
        return []
    return _sparkline_at(folder, stat.st_size, stat.st_mtime_ns)


@lru_cache(_MAX_CACHED)
def _sparkline_at(folder: RunFolder, size: int, changed: int) -> list[float]:
    return sparkline(by_step(folder.metrics()))


def summary(found: CatalogRun) -> dict[str, Any]:
    """A line of the list of runs."""
    run, progress = found.run, found.run.progress
    return {
        "id": run.run_id,
        "name": run.name,
        "environment": run.environment or _subject(found.folder),
        "model": _model_name(found.folder),
        "state": run.state,
        "active": run.is_active,
        "reason": run.reason and run.reason.removeprefix("PalestraError: "),
        "created": run.created,
        "started": run.started,
        "ended": run.ended,
        "seconds": run.seconds,
        "seconds_left": progress.get("seconds_left") if run.is_active else None,
        "step": progress.get("step", 0),
        "total_steps": progress.get("total_steps"),
        "reward_mean": progress.get("reward_mean"),
        "pass_rate": progress.get("percent_correct"),
        "eval_pass_rate": progress.get("eval_percent_correct"),
        "sparkline": _sparkline(found.folder),
        "folder": str(run.folder),
        "actions": actions(found),
    }


def actions(found: CatalogRun) -> list[str]:
    """Actions that the run allows now."""
    run, folder = found.run, found.folder
    has_checkpoint = folder.last_checkpoint() is not None
    has_weights = folder.model.is_dir() or has_checkpoint
    possible = {
        "stop": found.listed and run.state in ("pending", "starting", "running"),
        "resume": found.listed
        and (run.state in ("stopped", "completed") or (run.state == "failed" and has_checkpoint)),
        "delete": found.listed and not run.is_active,
        "export": has_weights,
        "chat": has_weights,
        "rescore": folder.rollouts_file.is_file(),
    }
    return [name for name, holds in possible.items() if holds]


def details(found: CatalogRun) -> dict[str, Any]:
    """Details of a run's page, in addition to summary, metrics and rollouts."""
    folder, record = found.folder, record_of(found.folder)
    report = folder.report() or {}
    settings, changed = _config(folder)
    best = folder.best_checkpoint()
    return {
        "config": settings,
        "changed": changed,
        "record": {name: record.get(name) for name in ("instructions", "tools", "source", "environment", "agent")},
        "findings": findings(found),
        "capability": record.get("capability"),
        "checkpoints": [
            {"name": str(step_of(path)), "step": step_of(path), "best": path == best, **_files(path)}
            for path in folder.step_checkpoints()
        ],
        "model_files": _files(folder.model) if folder.model.is_dir() else None,
        "logs": [part for part, path in found.run.logs.items() if path.is_file()],
        "evaluations": [str(name) for name in folder.eval_names()],
        "measures": measures(folder),
        "sampling": _sampling(folder, flatten(settings)),
        "report": {name: report[name] for name in ("before", "after", "changes", "seconds") if name in report} or None,
    }


def findings(found: CatalogRun) -> list[dict[str, Any]]:
    """The findings of the report, or those of the metrics so far; examples get the id of their rollout."""
    rows = [finding.to_dict() for finding in recorded_findings(found.folder, ended=not found.run.is_active)]
    for row in rows:
        if row["example"]:
            row["example"]["id"] = _rollout_id(found.folder, row["example"])
    return rows


def _rollout_id(folder: RunFolder, example: Mapping[str, Any]) -> int | None:
    """The dashboard's id of an example rollout; None if it is not on disk or not indexed yet."""
    index, kind = RolloutIndex(folder), example["source"]
    if kind not in index.kinds():
        return None
    index.update([kind], within_s=_INDEX_WITHIN_S)
    step = [] if kind in ("before", "after") else [example["step"]]
    where = "kind = ? AND step = ?" if step else "kind = ?"
    with index.open() as db:
        row = db.execute(
            f"SELECT id FROM rollouts WHERE {where} ORDER BY id LIMIT 1 OFFSET ?", [kind, *step, example["index"]]
        ).fetchone()
    return int(row[0]) if row else None


def measures(folder: RunFolder) -> list[dict[str, Any]]:
    """The measures by their metrics, and how much each counts in the reward (1 where the run does not say)."""
    weights: Mapping[str, float] = record_of(folder).get("reward_weights") or {}
    rows = folder.metrics()
    kinds = ("score/", "pass_rate/")
    names = dict.fromkeys(name.partition("/")[2] for row in rows for name in row if name.startswith(kinds))
    return [
        {"name": name, "weight": (w := weights.get(name, 1.0)), "rewarded": w != 0} for name in {**names, **weights}
    ]


def _sampling(folder: RunFolder, settings: Mapping[str, Any]) -> dict[str, float] | None:
    """Rollouts of a step as set, and their mean so far: more where groups with equal rewards were replaced."""
    problems, size = settings.get("train.problems_per_step"), settings.get("rollout.group_size")
    counts = [row["rollouts"] for row in folder.metrics() if isinstance(row.get("rollouts"), int | float)]
    return {"planned": problems * size, "mean": fmean(counts)} if problems and size and counts else None


def record_of(folder: RunFolder) -> dict[str, Any]:
    """run.json; empty while a run is starting, or if it is damaged."""
    try:
        return folder.record
    except (OSError, PalestraError):
        return {}


def _subject(folder: RunFolder) -> str:
    record = record_of(folder)
    environment = record.get("environment")
    name = environment.get("name") if isinstance(environment, Mapping) else environment
    return str(name or record.get("agent") or record.get("name") or "")


def _config(folder: RunFolder) -> tuple[dict[str, Any], list[str]]:
    """The settings by section, and the keys of those that are not at their defaults."""
    if not folder.config_file.is_file():
        return {}, []
    try:
        settings = folder.config.model_dump(mode="json")
    except PalestraError:
        return {}, []
    defaults = flatten(RunConfig().model_dump(mode="json"))
    return settings, [key for key, value in flatten(settings).items() if value != defaults.get(key)]


def _model_name(folder: RunFolder) -> str:
    """By the text of config.yaml: parsing it takes milliseconds, and a list has many runs."""
    try:
        text = read_regular(folder.config_file).decode("utf-8", "replace")
    except OSError:
        return str(record_of(folder).get("model") or "")
    section = text.partition("\nmodel:\n")[2]
    line = next((line for line in section.splitlines() if line.startswith("  name:")), "")
    return line.partition(":")[2].strip().strip("'\"")


def _files(path: Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": folder_size(path), "created": path.stat().st_mtime}
