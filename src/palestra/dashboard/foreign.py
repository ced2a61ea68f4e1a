"""Runs that others made: TRL's completions, verifiers' results, ATIF trajectories, the Tinker cookbook's logs.

Each is converted into a run folder of ours in the cache, so that everything that reads run folders reads them, too.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.files import append_jsonl, cache_folder, read_jsonl, write_json
from palestra.core.group_codec import rollout_from_dict
from palestra.core.run_folder import RunFolder
from palestra.dashboard.catalog import ImportedRun
from palestra.dashboard.cookbook_log import cookbook_rows
from palestra.dashboard.foreign_rows import Row, atif_rows, trace_rows, trl_rows, verifiers_rows
from palestra.evals.rollout_stats import rollout_stats

# that a rollout without turns and tool results would have as 0
_OF_TOKENS = (
    "completion_length_mean",
    "completion_length_max",
    "conversation_length_max",
    "sampled_tokens",
    "turns_mean",
    "context_full_rate",
    "looping_rate",
    "tools_offered",
    "tool_error_rate",
    "unknown_tool_rate",
)


@dataclass(frozen=True, slots=True)
class _Format:
    source: str
    patterns: tuple[str, ...]  # of its files, below the path
    read: Callable[[Path, int], Iterator[Row]]  # a file, and its place among them; `evaluation` is no rollout's own


def open_foreign(path: Path) -> ImportedRun | None:
    """The foreign run at a path, converted; None where nothing is known there."""
    for known in _FORMATS:
        if _files(known, path):
            name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
            folder = RunFolder(cache_folder() / "dashboard" / "imports" / f"{path.resolve().name}-{name}")
            _convert(known, path, folder)
            return ImportedRun(folder, known.source, partial(_convert, known, path, folder))
    return None


def _files(known: _Format, path: Path) -> list[Path]:
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in known.patterns) else []
    return sorted({found for pattern in known.patterns for found in path.rglob(pattern)})


def _convert(known: _Format, path: Path, folder: RunFolder) -> None:
    """Write the run folder, unless it is there and its files are as they were."""
    files = _files(known, path)
    stamp = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    with suppress(OSError, PalestraError):
        if folder.record.get("stamp") == stamp:
            return
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.rollouts_file.unlink(missing_ok=True)
    folder.metrics_file.unlink(missing_ok=True)
    shutil.rmtree(folder.evals, ignore_errors=True)
    rows = (row for number, file in enumerate(files) for row in known.read(file, number))
    metrics = _own_metrics(path)
    for (step, evaluation), members in groupby(rows, lambda row: (row["step"], row.pop("evaluation", None))):
        found = list(members)
        if evaluation is None:
            append_jsonl(folder.rollouts_file, found)
            append_jsonl(folder.metrics_file, [{"step": step, **metrics.get(step, {}), **_stats(found)}])
        else:
            folder.evals.mkdir(exist_ok=True)
            append_jsonl(folder.eval_file(evaluation), found)
    if not folder.rollouts_file.is_file():
        raise PalestraError(f"{path} looks like a run of {known.source}, and holds no rollout that can be read")
    newest = max(file.stat().st_mtime for file in files)
    created = time.strftime("%Y%m%d-%H%M%S", time.localtime(newest))
    about = {"format": 1, "name": path.resolve().name, "created": created, "agent": known.source, "stamp": stamp}
    write_json(folder.record_file, about)


def _stats(rows: list[Row]) -> dict[str, float]:
    """What is known without tokens."""
    stats = rollout_stats([rollout_from_dict(row) for row in rows])
    calls = sum(len(message["tool_calls"]) for row in rows for message in row["messages"])
    rewards: dict[tuple[Any, str], list[float]] = {}
    for row in rows:
        rewards.setdefault((row["group"], row["problem_id"]), []).append(row["reward"])
    own = {"tool_calls_mean": calls / len(rows)}
    if groups := [group for group in rewards.values() if len(group) > 1]:
        own["equal_reward_groups"] = sum(len(set(group)) == 1 for group in groups) / len(groups)
    return {name: stats[name] for name in stats if name not in _OF_TOKENS} | own


def _own_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The cookbook writes metrics of its own: those of each step."""
    found: dict[int, dict[str, float]] = {}
    for row in read_jsonl(path / "metrics.jsonl") if path.is_dir() else ():
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        found.setdefault(int(numbers.pop("step", 0)), {}).update(numbers)
    return found


_FORMATS = (
    _Format("trl", ("completions_*.parquet",), trl_rows),
    _Format("cookbook", ("*rollout_summaries.jsonl",), cookbook_rows),
    _Format("verifiers", ("results.jsonl",), verifiers_rows),
    _Format("verifiers", ("traces.jsonl",), trace_rows),
    _Format("atif", ("*trajectory*.json",), atif_rows),
)
