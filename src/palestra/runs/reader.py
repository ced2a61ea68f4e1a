"""Reads runs from the index and their folders, and compares them. Changes nothing: no writes, no signals."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from palestra.core.config import flatten, load_yaml
from palestra.core.errors import NotFoundError, PalestraError, missing_package
from palestra.core.files import last_lines, last_rows
from palestra.core.run_folder import RunFolder, numbered_rows
from palestra.core.secrets import redact
from palestra.core.text import show_path, visible
from palestra.runs.index import ACTIVE, PARTS, Index, PartRow, Row, State, UnknownRun, id_of, palestra_home

Part = Literal["trainer", "env", "api", "supervisor"]
Runs = list["Run"]
Lines = list[str]
Rows = list[dict[str, float]]

# the name in a metrics row -> the name in a run's progress
_PROGRESS = {
    "step": "step",
    "reward_mean": "reward_mean",
    "pass_rate": "percent_correct",
    "eval/pass_rate": "eval_percent_correct",
    "loss": "loss",
}
_FOLLOW_S = 0.3
_RECENT_ROWS = 40
_HISTORY_ROWS = 50
_MAX_LOG_LINES = 8
_MAX_REASON_CHARS = 1500
_PART_NAMES = {"api": "the trajectory API", "trainer": "the trainer", "env": "the environment"}
_ERROR_LINE = re.compile(r"^(Error: |[\w.]*(Error|Exception|Interrupt)\b.*: )")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run at the moment of reading."""

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
    progress: Mapping[str, float]  # step, total_steps, reward_mean, percent_correct, loss, seconds_left, …

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def seconds(self) -> float:
        """How long it has run, also before it was resumed."""
        this_life = 0.0 if self.started is None else max(0.0, (self.ended or time.time()) - self.started)
        return max(this_life, self.progress.get("elapsed_seconds", 0.0))

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        paths = {"folder": str(self.folder), "logs": {part: str(path) for part, path in self.logs.items()}}
        return values | paths | {name: dict(values[name]) for name in ("processes", "ports", "progress")}


class RunReader:
    """All runs of one home. A run whose processes have died is shown as failed; `RunManager.gc` records it."""

    _writes: ClassVar[bool] = False

    def __init__(self, home: Path | None = None) -> None:
        self.home = palestra_home() if home is None else home.absolute()
        self._index = Index(self.home, create=self._writes)

    def get(self, run_id: str) -> Run:
        """The run with this id; PalestraError if there is none."""
        return read_run(self._index.row(run_id))

    def of_folder(self, folder: RunFolder) -> Run:
        """The run in a folder, also one that the index does not list."""
        return read_run(self.row_of(folder))

    def row_of(self, folder: RunFolder) -> Row:
        """The row of the run in a folder; of a copy, with an id of its own."""
        row = self._index.row_in(folder.path)
        with contextlib.suppress(UnknownRun):
            if Path(self._index.row(row.run_id).folder).resolve() != folder.path.resolve():
                return row.model_copy(update={"run_id": id_of(folder.path)})
        return row

    def lists(self, folder: RunFolder) -> bool:
        return self._index.lists(folder.path)

    def list(self) -> Runs:
        return self.page(None)[0]

    def page(self, limit: int | None, offset: int = 0) -> tuple[Runs, int]:
        """`limit` runs from the `offset`-th on, newest first, and how many there are."""
        return [read_run(row) for row in self._index.rows(limit, offset)], self._index.count()

    def logs(self, run_id: str, part: Part = "trainer", lines: int = 50) -> Lines:
        """The last lines of a process's log, with secrets redacted; empty if it has written nothing."""
        paths = self.get(run_id).logs
        if part not in paths:
            remedy = f"it has {', '.join(paths)}" if paths else "it was started in a terminal, and wrote there"
            raise NotFoundError(f"the run {run_id} has no log of {str(part)[:80]!r}; {remedy}")
        return tail(paths[part], lines)

    def follow(self, run_id: str, part: Part = "trainer", *, start: int | None = None) -> Iterator[str]:
        """Redacted lines of a process's log, from the byte `start` or the present end until the run has ended."""
        path = self.get(run_id).logs[part]
        while self.get(run_id).is_active and not path.is_file():
            time.sleep(_FOLLOW_S)
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            file.seek(*((0, 2) if start is None else (start, 0)))
            while True:
                is_active = self.get(run_id).is_active
                while line := file.readline():
                    yield redact(line)
                if not is_active:
                    return
                time.sleep(_FOLLOW_S)

    def metrics(self, run_id: str) -> Rows:
        return self.folder(run_id).metrics()

    def results(self, run_id: str) -> dict[str, Any]:
        """run_id, state, reason, final_metrics, history (at most 50 rows), report (before and after, or None),
        report_path, checkpoint (the last) and model_path (None until the run has one), which `load_model` loads."""
        return results(self.get(run_id))

    def watch(self, run_id: str, every_s: float = 0.5) -> Iterator[Run]:
        """The run now, and again whenever it has changed, until it has ended."""
        last: Run | None = None
        while True:
            run = self.get(run_id)
            if run != last:
                yield run
            if not run.is_active:
                return
            last = run
            time.sleep(every_s)

    def folder(self, run_id: str) -> RunFolder:
        return RunFolder(Path(self._index.row(run_id).folder))


def read_run(row: Row) -> Run:
    """A run from its row and its folder."""
    folder = RunFolder(Path(row.folder))
    parts = PARTS if folder.wire.is_dir() else ("trainer",)
    return Run(
        run_id=row.run_id,
        name=visible(row.name),  # a folder from elsewhere may hold any characters
        environment=visible(row.environment),
        state=row.state,
        reason=row.reason and visible(row.reason),
        folder=folder.path,
        created=row.created,
        started=row.started,
        ended=row.ended,
        processes={part: _process_state(row.parts.get(part), row) for part in parts},
        logs={part: folder.log_file(part) for part in (*parts, "supervisor")} if row.kind == "managed" else {},
        ports=row.ports if row.state in ACTIVE else {},
        progress=progress(folder),
    )


def _process_state(part: PartRow | None, row: Row) -> str:
    if row.kind == "foreground":
        return "running" if row.state in ACTIVE else f"exited ({row.state})"
    if part is None:
        return "not started"
    if part.exit_code is None and part.process.is_alive:
        return "running"
    return f"exited ({'unknown' if part.exit_code is None else part.exit_code})"


def progress(folder: RunFolder) -> dict[str, float]:
    """The newest value of the main metrics, from the end of metrics.jsonl and the report; the time that is left."""
    values: dict[str, float] = {}
    rows = numbered_rows(last_rows(folder.metrics_file, _RECENT_ROWS))
    for row in rows:
        values |= {name: row[key] for key, name in _PROGRESS.items() if key in row}
    try:
        total = float(folder.record.get("steps") or 0)
    except (OSError, PalestraError, ValueError, TypeError, OverflowError):
        total = 0.0
    if total:
        values["total_steps"] = total
    if timed := [row for row in rows if "elapsed_seconds" in row]:
        first, last = timed[0], timed[-1]
        values["elapsed_seconds"] = last["elapsed_seconds"]  # also before it was resumed
        steps = last["step"] - first["step"]
        if total and steps > 0:
            per_step = (last["elapsed_seconds"] - first["elapsed_seconds"]) / steps
            values["seconds_left"] = max(0.0, per_step * (total - last["step"]))
    match folder.report():
        case {"after": {"pass_rate": {"rate": int() | float() as after}}}:
            values["eval_percent_correct"] = after
    return values


def results(run: Run) -> dict[str, Any]:
    folder = RunFolder(run.folder)
    rows, report, checkpoint = folder.metrics(), folder.report(), folder.last_checkpoint()
    return {
        "run_id": run.run_id,
        "state": run.state,
        "reason": run.reason,
        "final_metrics": merge_last_step(rows[-3:]),
        "history": sample(rows, _HISTORY_ROWS),
        "report": report and {key: report[key] for key in ("before", "after", "changes", "seconds") if key in report},
        "report_path": str(folder.report_page) if folder.report_page.is_file() else None,
        "model_path": str(folder.model) if folder.model.is_dir() else None,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }


def merge_last_step(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """All values of the last step: an evaluation writes a second row for its step."""
    out: dict[str, float] = {}
    for row in rows:
        out = {**out, **row} if out.get("step") == row.get("step") else dict(row)
    return out


def sample(rows: Rows, count: int) -> Rows:
    """At most `count` rows, evenly spaced, including the first and the last."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def tail(path: Path, count: int) -> Lines:
    """The last lines of a log, with secrets redacted."""
    lines = [line for text in last_lines(path, count) for line in text.splitlines() or [""]]
    return redact("\n".join(lines[-count:])).split("\n") if lines else []


def why_it_ended(part: str, exit_code: int, log: Path, *, packages: bool = False) -> str:
    """How a process ended, with the error in its log. `packages`: a missing package can be installed with --with."""
    name = _PART_NAMES.get(part, part)
    if exit_code < 0:
        signals = {each.value: each.name for each in signal.Signals}
        memory = "; perhaps out of memory" if -exit_code == signal.SIGKILL else ""
        return f"{name} was killed by {signals.get(-exit_code, f'signal {-exit_code}')}{memory}"
    sentence = f"{name} ended with exit code {exit_code}"
    text = "\n".join(error_lines(tail(log, 200))) if exit_code > 0 else ""
    if packages and (package := missing_package(text)):
        text += f"\nIf {package} is a package that it needs, add: --with {package}"
    return f"{sentence}:\n{text[-_MAX_REASON_CHARS:]}" if text else sentence


def error_lines(lines: Lines) -> Lines:
    """From the last line that looks like an error to the end; the last three lines if none does."""
    lines = [line.rstrip() for line in lines if line.strip()]
    last = max((i for i, line in enumerate(lines) if _ERROR_LINE.match(line)), default=None)
    return lines[-3:] if last is None else lines[last : last + _MAX_LOG_LINES]


_OWN_SETTINGS = ("output_dir", "track.run_name")  # they differ in every run


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs: its settings, results and curves."""

    run: Run
    settings: dict[str, Any]
    summary: dict[str, float | None]
    pass_rates: list[float]
    rewards: list[tuple[float, float]]

    @property
    def label(self) -> str:
        """Its id; the folder of a copy, whose id says nothing to a person."""
        return show_path(self.run.folder) if self.run.run_id == id_of(self.run.folder) else self.run.run_id


def compared(run: Run) -> ComparedRun:
    """A run with its results, for a comparison."""
    folder = RunFolder(run.folder)
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
    settings = flatten(load_yaml(folder.config_file)) if folder.config_file.is_file() else {}
    settings = {key: value for key, value in settings.items() if key not in _OWN_SETTINGS}
    pass_rates = [row["pass_rate"] for row in trained if "pass_rate" in row]
    return ComparedRun(run, settings, summary, pass_rates, [(row["step"], row["reward_mean"]) for row in trained])


def _held_out_rate(evaluation: Any) -> float | None:
    """None where the training cases were scored, because none were held out."""
    match evaluation:
        case {"split": "train"}:
            return None
        case {"pass_rate": {"rate": int() | float() as rate}}:
            return rate
    return None
