"""The tracker that is always on: metrics.jsonl and rollouts.jsonl in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.files import write_text
from palestra.core.group_codec import rollout_to_dict
from palestra.core.types import Group


class JsonlTracker:
    """One line a step in metrics.jsonl, one line a rollout in rollouts.jsonl."""

    def __init__(self, folder: Path, resume_after: int | None = None) -> None:
        self._metrics = folder / "metrics.jsonl"
        self._rollouts = folder / "rollouts.jsonl"
        if resume_after is not None:
            for path in (self._metrics, self._rollouts):
                _forget_after(path, resume_after)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        _append(self._metrics, [{"step": step, **row}])

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        _append(self._rollouts, [{"step": step, **rollout_to_dict(r)} for g in groups for r in g.rollouts])

    def close(self) -> None:
        pass


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """What has been written to a run folder's metrics.jsonl so far, a row a step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # a last line that is being written, or was when the run was killed, is not there yet
    return [json.loads(line) for line in lines if _step_of(line) < float("inf")]


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def _forget_after(path: Path, step: int) -> None:
    """Drop the records of steps that a resumed run does again, and any half-written last line."""
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        write_text(path, "".join(f"{line}\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")
