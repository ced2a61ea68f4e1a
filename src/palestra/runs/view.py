"""A run as others see it: put together from its row and its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.runs.explain import tail
from palestra.runs.index import ACTIVE, Index, PartRow, Row, State
from palestra.runs.plan import STOP_ORDER, has_wire, logs
from palestra.runs.store import RunFolder
from palestra.tracking.jsonl import read_metrics

# what a metrics row calls it -> what a run's progress calls it
_PROGRESS = {
    "step": "step",
    "reward_mean": "reward_mean",
    "pass_rate": "percent_correct",
    "eval/pass_rate": "eval_percent_correct",
    "loss": "loss",
}
_RECENT_ROWS = 40
_HISTORY_ROWS = 50


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as it stands at the moment of asking."""

    run_id: str  # 8 characters
    name: str
    environment: str
    state: State
    reason: str | None  # why it failed, or what it waits for
    folder: Path
    created: float  # seconds since the epoch, as the two below
    started: float | None
    ended: float | None
    processes: Mapping[str, str]  # api, trainer, env -> "running", "exited (code)" or "not started"
    logs: Mapping[str, Path]  # the same parts, and supervisor
    ports: Mapping[str, int]  # api, trainer
    progress: Mapping[str, float]  # of step, reward_mean, percent_correct, eval_percent_correct, loss: what is known

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        paths = {"folder": str(self.folder), "logs": {part: str(path) for part, path in self.logs.items()}}
        return plain | paths | {name: dict(plain[name]) for name in ("processes", "ports", "progress")}


def view(index: Index, row: Row) -> Run:
    folder = Path(row.folder)
    parts = list(reversed(STOP_ORDER)) if has_wire(folder) else ["trainer"]
    known = {part.part: part for part in index.parts(row.run_id)}
    processes = {part: _words(known.get(part), row) for part in parts}
    return Run(
        run_id=row.run_id,
        name=row.name,
        environment=row.environment,
        state=row.state,
        reason=row.reason,
        folder=folder,
        created=row.created,
        started=row.started,
        ended=row.ended,
        processes=processes,
        logs=logs(folder, [*parts, "supervisor"]) if row.kind == "managed" else {},
        ports=index.ports(row.run_id),
        progress=progress(folder),
    )


def _words(part: PartRow | None, row: Row) -> str:
    if row.kind == "foreground":
        return "running" if row.state in ACTIVE else f"exited ({row.state})"
    if part is None:
        return "not started"
    if part.exit_code is None and part.process.is_alive:
        return "running"
    return f"exited ({'unknown' if part.exit_code is None else part.exit_code})"


def progress(folder: Path) -> dict[str, float]:
    """The newest value of each of the few numbers worth knowing, without reading the whole file."""
    known: dict[str, float] = {}
    for line in tail(folder / "metrics.jsonl", _RECENT_ROWS):
        try:
            row = json.loads(line)
        except ValueError:  # cut off at the start, or being written
            continue
        known |= {ours: row[theirs] for theirs, ours in _PROGRESS.items() if theirs in row}
    after = ((report(folder) or {}).get("after") or {}).get("pass_rate", {}).get("rate")
    return known | ({} if after is None else {"eval_percent_correct": after})


def report(folder: Path) -> dict[str, Any] | None:
    """Held-out results before and after, once the run has ended."""
    try:
        data = json.loads((folder / "report.json").read_text())
    except (OSError, ValueError):
        return None
    return {key: data[key] for key in ("before", "after", "changes", "seconds") if key in data}


def results(run: Run) -> dict[str, Any]:
    """What a run has come to."""
    folder, rows = run.folder, read_metrics(run.folder)
    page = folder / "report.html"
    return {
        "run_id": run.run_id,
        "state": run.state,
        "reason": run.reason,
        "final_metrics": merged(rows[-3:]),
        "history": sample(rows, _HISTORY_ROWS),
        "report": report(folder),
        "report_path": str(page) if page.is_file() else None,
        "model_path": str(folder / "model") if (folder / "model" / "palestra.json").is_file() else None,
        "checkpoint": _last_checkpoint(folder),
    }


def merged(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The last step's numbers: an evaluation writes a row of its own for its step."""
    out: dict[str, float] = {}
    for row in rows:
        out = {**out, **row} if out.get("step") == row.get("step") else dict(row)
    return out


def sample(rows: list[dict[str, float]], count: int) -> list[dict[str, float]]:
    """At most `count` rows, evenly spread, the first and the last among them."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _last_checkpoint(folder: Path) -> str | None:
    found = RunFolder(folder).step_checkpoints
    return str(found[-1]) if found else None
