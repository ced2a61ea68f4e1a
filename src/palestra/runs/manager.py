"""The run manager: start, look at, stop, resume. Whoever calls it may go away; the runs stay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from palestra.core.errors import NotYetError

State = Literal["pending", "starting", "running", "stopping", "stopped", "completed", "failed"]
Part = Literal["trainer", "env", "api", "supervisor"]

ACTIVE: tuple[State, ...] = ("pending", "starting", "running", "stopping")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to train on, and how.

    `settings` are dotted keys of RunConfig, `env_settings` fields of the environment's own config, and
    `server_settings` what an Atropos environment is told of its inference server. `wire` says whether the
    environment runs as a process of its own; None: only where it must (Atropos). Neither environment nor
    agent file: the demo.
    """

    environment: str | None = None
    agent_file: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    server_settings: Mapping[str, Any] = field(default_factory=dict)
    wire: bool | None = None
    name: str | None = None
    backend: str = "local"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as it stands at the moment of asking."""

    run_id: str  # 8 characters
    name: str
    environment: str
    state: State
    reason: str | None  # why it failed, or is waiting
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


def palestra_home() -> Path:
    """Where the index of runs lives: PALESTRA_HOME, or ~/.palestra."""
    return Path(os.environ.get("PALESTRA_HOME") or Path.home() / ".palestra")


class RunManager:
    """All runs of one home. Every call first finds out which of them have died."""

    def __init__(self, home: Path | None = None, *, max_runs: int | None = None) -> None:
        self.home = home or palestra_home()
        self.max_runs = max_runs

    def start(self, request: RunRequest) -> Run:
        """Start a run in the background, or queue it; returns at once. Bad settings raise PalestraError."""
        raise NotYetError("the run manager is not built yet")

    def get(self, run_id: str) -> Run:
        """The run, or PalestraError where there is none of this id."""
        raise NotYetError("the run manager is not built yet")

    def list(self) -> list[Run]:
        """All runs, newest first."""
        raise NotYetError("the run manager is not built yet")

    def stop(self, run_id: str, wait_s: float = 60.0) -> Run:
        """Stop a run with a checkpoint, and wait until it has ended (at most `wait_s`)."""
        raise NotYetError("the run manager is not built yet")

    def resume(self, run_id: str) -> Run:
        """Go on with a run that was stopped or failed, from its last checkpoint."""
        raise NotYetError("the run manager is not built yet")

    def remove(self, run_id: str, *, keep_folder: bool = False) -> None:
        """Forget a run that has ended, and delete its folder."""
        raise NotYetError("the run manager is not built yet")

    def logs(self, run_id: str, part: Part = "trainer", lines: int = 50) -> list[str]:
        """The last lines of a part's log, without secrets; empty where it has written nothing."""
        raise NotYetError("the run manager is not built yet")

    def metrics(self, run_id: str) -> list[dict[str, float]]:
        """One row a step."""
        raise NotYetError("the run manager is not built yet")

    def results(self, run_id: str) -> dict[str, Any]:
        """run_id, state, reason, final_metrics, history (at most 50 rows), report (before and after, or None),
        report_path and model_path (text, or None while there is none); `load_model(model_path)` loads it."""
        raise NotYetError("the run manager is not built yet")

    def watch(self, run_id: str, every_s: float = 0.5) -> Iterator[Run]:
        """The run now, and again whenever something about it has changed, until it has ended."""
        raise NotYetError("the run manager is not built yet")
