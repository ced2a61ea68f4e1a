"""The runs that a dashboard shows: those of the index, or those at a path.

A line of the list for each, everything about one, and its metrics as columns for charts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.core.config import RunConfig, flatten
from palestra.core.errors import PalestraError
from palestra.core.files import folder_size, parse_row, read_from, read_regular
from palestra.core.run_folder import RunFolder, step_of
from palestra.evals.findings import recorded_findings
from palestra.evals.rollout_stats import CALL_PROBLEM_RATES
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.runs.index import UnknownRun, id_of, run_folders, subject_of
from palestra.runs.manager import Run, RunManager
from palestra.runs.reader import merge_last_step, sample


@dataclass(frozen=True, slots=True)
class CatalogRun:
    run: Run
    folder: RunFolder
    listed: bool = True  # in the index, so that it can be stopped, resumed and deleted

    @property
    def id(self) -> str:
        return self.run.run_id


class Catalog:
    """Finds runs: those in `folders`, or all of the index."""

    def __init__(self, manager: RunManager, folders: Sequence[RunFolder] | None = None, *, trust: bool = False) -> None:
        self.manager = manager
        self.trust_words = ["--trust"] if trust else []  # for commands that run code which a folder names
        self._folders = folders

    def all(self) -> list[CatalogRun]:
        """Newest first."""
        if self._folders is None:
            runs = [CatalogRun(run, RunFolder(run.folder)) for run in self.manager.list()]
            known = {run.folder.path for run in runs}
            below = (folder for folder in run_folders(Path("runs")) if folder.has_begun)
            runs += [self._unlisted(folder) for folder in below if folder.path not in known]
        else:
            runs = [self._unlisted(folder) for folder in self._folders if folder.has_begun]
        runs = list(_with_own_ids(runs))
        return sorted(runs, key=lambda entry: entry.run.created, reverse=True)

    def get(self, run_id: str) -> CatalogRun:
        if self._folders is None:
            try:
                run = self.manager.get(run_id)
                return CatalogRun(run, RunFolder(run.folder))
            except UnknownRun as error:
                reason: PalestraError = error
        else:
            reason = UnknownRun(f"there is no run {run_id[:80]!r} here")
        entry = next((entry for entry in self.all() if entry.id == run_id), None)
        if entry is None:
            raise reason
        return entry

    def _unlisted(self, folder: RunFolder) -> CatalogRun:
        run = self.manager.of_folder(folder)
        return CatalogRun(run, folder, self.manager.lists(folder))


def _with_own_ids(runs: Sequence[CatalogRun]) -> Iterator[CatalogRun]:
    """The runs, each with an id of its own: copies of a folder hold the same id."""
    seen: set[str] = set()
    for entry in sorted(runs, key=lambda entry: not entry.listed):  # the index's ids stay as they are
        if entry.id in seen:
            entry = replace(entry, run=replace(entry.run, run_id=id_of(entry.folder.path)))
        seen.add(entry.id)
        yield entry


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


def summary(entry: CatalogRun) -> dict[str, Any]:
    """A line of the list of runs."""
    run, progress = entry.run, entry.run.progress
    return {
        "id": run.run_id,
        **{name: getattr(run, name) for name in ("name", "state", "created", "started", "ended", "seconds")},
        "environment": run.environment or subject_of(record_of(entry.folder)),
        "model": _model_name(entry.folder),
        "active": run.is_active,
        "reason": run.reason and run.reason.removeprefix("PalestraError: "),
        "seconds_left": progress.get("seconds_left") if run.is_active else None,
        "step": progress.get("step", 0),
        "total_steps": progress.get("total_steps"),
        "reward_mean": progress.get("reward_mean"),
        "pass_rate": progress.get("percent_correct"),
        "eval_pass_rate": progress.get("eval_percent_correct"),
        "sparkline": _sparkline(entry.folder),
        "folder": str(run.folder),
        "actions": actions(entry),
    }


def actions(entry: CatalogRun) -> list[str]:
    run, folder = entry.run, entry.folder
    has_checkpoint = folder.last_checkpoint() is not None
    possible = {
        "stop": entry.listed and run.state in ("pending", "starting", "running"),
        "resume": entry.listed
        and (run.state in ("stopped", "completed") or (run.state == "failed" and has_checkpoint)),
        "delete": entry.listed and not run.is_active,
        "export": folder.model.is_dir() or has_checkpoint,
        "rescore": folder.rollouts_file.is_file(),
    }
    return [name for name, holds in possible.items() if holds]


def details(entry: CatalogRun) -> dict[str, Any]:
    """Details of a run's page, in addition to summary, metrics and rollouts."""
    folder, record = entry.folder, record_of(entry.folder)
    report = folder.report() or {}
    try:
        settings = folder.config.model_dump(mode="json") if folder.config_file.is_file() else {}
    except PalestraError:
        settings = {}
    values, defaults, best = flatten(settings), flatten(RunConfig().model_dump(mode="json")), folder.best_checkpoint()
    # rollouts of a step as set, and their mean so far: more where groups with equal rewards were replaced
    problems, size = values.get("train.problems_per_step"), values.get("rollout.group_size")
    counts = [row["rollouts"] for row in folder.metrics() if isinstance(row.get("rollouts"), int | float)]
    return {
        "config": settings,
        "changed": [key for key, value in values.items() if value != defaults.get(key)],
        "record": {name: record.get(name) for name in ("instructions", "tools", "source", "environment", "agent")},
        "findings": findings(entry),
        "capability": record.get("capability"),
        "checkpoints": [
            {"name": str(step_of(path)), "step": step_of(path), "best": path == best, **_files(path)}
            for path in folder.step_checkpoints()
        ],
        "model_files": _files(folder.model) if folder.model.is_dir() else None,
        "logs": [part for part, path in entry.run.logs.items() if path.is_file()],
        "evaluations": [str(name) for name in folder.eval_names()],
        "measures": measures(folder),
        "sampling": {"planned": problems * size, "mean": fmean(counts)} if problems and size and counts else None,
        "report": {name: report[name] for name in ("before", "after", "changes", "seconds") if name in report} or None,
    }


def findings(entry: CatalogRun) -> list[dict[str, Any]]:
    """The findings of the report, or those of the metrics so far; examples get the id of their rollout."""
    rows = [finding.to_dict() for finding in recorded_findings(entry.folder, ended=not entry.run.is_active)]
    index = RolloutIndex(entry.folder)
    for example in [row["example"] for row in rows if row["example"]]:
        kind, example["id"] = example["source"], None
        if kind not in index.kinds():
            continue
        index.update([kind], within_s=_INDEX_WITHIN_S)
        step = [] if kind in ("before", "after") else [example["step"]]
        query = f"SELECT id FROM rollouts WHERE kind = ?{' AND step = ?' if step else ''} ORDER BY id LIMIT 1 OFFSET ?"
        row = index.query(query, kind, *step, example["index"])
        example["id"] = int(row[0][0]) if row else None  # None: it is not indexed yet
    return rows


def measures(folder: RunFolder) -> list[dict[str, Any]]:
    """The measures by their metrics, and how much each counts in the reward (1 where the run does not say)."""
    weights: Mapping[str, float] = record_of(folder).get("reward_weights") or {}
    rows = folder.metrics()
    kinds = ("score/", "pass_rate/")
    names = dict.fromkeys(name.partition("/")[2] for row in rows for name in row if name.startswith(kinds))
    return [{"name": key, "weight": (w := weights.get(key, 1.0)), "rewarded": w != 0} for key in {**names, **weights}]


def record_of(folder: RunFolder) -> dict[str, Any]:
    """run.json; empty while a run is starting, or if it is damaged."""
    try:
        return folder.record
    except (OSError, PalestraError):
        return {}


def _model_name(folder: RunFolder) -> str:
    """By the text of config.yaml: parsing it takes milliseconds, and a list has many runs."""
    try:
        text = read_regular(folder.config_file).decode("utf-8", "replace")
    except OSError:
        return str(record_of(folder).get("model") or "")
    line = next((line for line in text.partition("\nmodel:\n")[2].splitlines() if line.startswith("  name:")), "")
    return line.partition(":")[2].strip().strip("'\"")


def _files(path: Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": folder_size(path), "created": path.stat().st_mtime}


Row = Mapping[str, Any]
_SPARKLINE_POINTS = 60
# of a step, in their order; "agent_loop" is what is left: tools, environments and measures that rollouts waited for
_PHASES = "prefill decode planning template agent_loop learner packing preparing publishing records".split()

# title, unit, and the names or beginnings of names ("score/") of a chart, in the order of display
_CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "", ("reward_mean", "reward_max", "reward_min")),
    ("Pass rate", "%", ("pass_rate", "eval/pass_rate")),
    ("Measures", "", ("score/",)),
    ("Measures passed", "%", ("pass_rate/",)),
    ("Groups without signal", "%", ("equal_reward_groups", "failed_groups", "passed_groups")),
    ("Rollouts with a positive advantage", "", ("reinforced_rollouts", "reinforced_without_tools")),
    ("Tool calls per rollout", "", ("tool_calls_mean",)),
    ("Tool errors", "%", ("tool_error_rate", *CALL_PROBLEM_RATES.values())),
    ("Calls in another format", "%", ("other_format_rate", "unread_call_rate", "unrun_call_rate")),
    ("Turns per rollout", "", ("turns_mean",)),
    (
        "Sampled tokens per rollout",
        "tokens",
        ("completion_length_mean", "completion_length_max", "conversation_length_max"),
    ),
    ("Cut off", "%", ("truncation_rate", "context_full_rate", "looping_rate")),
    ("Entropy", "nats", ("entropy", "optim/entropy")),
    ("KL", "nats", ("kl", "kl_reference", "kl_sampler", "optim/kl_sample_train_v1", "optim/kl_sample_train_v2")),
    ("Sampler gap", "nats", ("sampler_gap_mean", "sampler_gap_max")),
    ("Other experts in the learner", "%", ("routing_mismatch",)),
    ("Importance ratio", "", ("ratio_mean", "ratio_max")),
    ("Clipped", "%", ("clip_fraction_low", "clip_fraction_high")),
    ("Advantage", "", ("advantage_max", "advantage_mean", "advantage_min")),
    ("Loss", "", ("loss", "policy_loss", "echo_loss", "distill_loss")),
    ("Distillation", "nats", ("distill_divergence",)),
    ("Signs of a hint", "%", ("hint_leak_rate",)),
    ("Gradient norm", "", ("grad_norm",)),
    ("Learning rate", "", ("learning_rate", "optim/lr")),
    ("Tokens per second", "tokens/s", ("sample_tokens_per_second", "train_tokens_per_s")),
    ("Time of a step", "s", ("sample_seconds", "train_seconds")),
    ("Time by phase", "s", tuple(f"{phase}_seconds" for phase in _PHASES)),
    ("Memory", "GiB", ("peak_memory_gib",)),
    ("Staleness", "steps", ("staleness_max", "stale_groups_dropped")),
    ("Failures", "", ("rollout_failures", "measure_errors", "hung_calls", "measure_errors/")),
)
# a metric without a chart of its own is a share by its name
_SHARE = re.compile(r"pass_rate|(?<!learning)_rate$|^tool_use|truncat|fraction|share")
_NOT_DRAWN = (
    "step elapsed_seconds rollouts groups sampled_tokens tokens_computed tokens_trained tools_offered reward_std"
).split()


def read_rows(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of metrics.jsonl from a byte on, and where the next read starts; from 0 if it was cut back."""
    data, start = read_from(path, start)
    whole = data[: data.rfind(b"\n") + 1]
    rows = [row for row in map(parse_row, whole.splitlines()) if row and isinstance(row.get("step"), int | float)]
    return rows, start + len(whole)


def by_step(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row a step: an evaluation writes a second one for its step."""
    steps: dict[float, list[Row]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return [merge_last_step(steps[step]) for step in sorted(steps)]


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    """{"step": […], "series": {name: […]}}; null where a step has no value."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    series = {name: [_number(row.get(name)) for row in rows] for name in names}
    drawn = {name: values for name, values in series.items() if any(value is not None for value in values)}
    return {"step": [row["step"] for row in rows], "series": drawn}


def charts(names: Sequence[str]) -> list[dict[str, Any]]:
    """Metric names grouped into charts, each name once; unknown names come last."""
    left = [name for name in names if name not in _NOT_DRAWN]
    grouped = []
    for title, unit, known in _CHARTS:
        mine = [name for key in known for name in left if name == key or (key.endswith("/") and name.startswith(key))]
        if mine:
            left = [name for name in left if name not in mine]
            grouped.append({"title": title, "unit": unit, "names": mine})
    units = {name: "%" if _SHARE.search(name) else "" for name in left}
    return grouped + [{"title": name.replace("_", " "), "unit": unit, "names": [name]} for name, unit in units.items()]


def sparkline(rows: Sequence[Row]) -> list[float]:
    values = [{"y": value} for row in rows if (value := _number(row.get("reward_mean"))) is not None]
    return [point["y"] for point in sample(values, _SPARKLINE_POINTS)]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
