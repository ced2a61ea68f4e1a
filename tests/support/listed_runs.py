"""Runs in an index, as their supervisors or commands would have left them."""

import time
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs.index import Index
from palestra.runs.processes import this_host


def list_run(index: Index | Path, run_id: str, folder: RunFolder | Path | None = None, **values: Any) -> None:
    """Add a run to the index (or to that of a home); by default a managed run that waits, in an empty folder."""
    index = index if isinstance(index, Index) else Index(index)
    path = folder.path if isinstance(folder, RunFolder) else folder or index.path.parent / "runs" / run_id
    path.mkdir(parents=True, exist_ok=True)
    now = time.time()
    row = {
        "run_id": run_id, "name": f"name of {run_id}", "environment": "e", "folder": str(path),
        "kind": "managed", "state": "pending", "created": now, "launched": now, "host": this_host(),
    }  # fmt: skip
    index.add(**{**row, **values})


def ended_run(home: Path, path: Path, run_id: str, name: str = "clerk", **values: Any) -> RunFolder:
    """A run folder with its row in the index; completed unless `state` says otherwise."""
    run = RunFolder.create(path.parent, name, values.pop("config", RunConfig()), values.pop("record", {}), at=path)
    now = time.time()
    times = {"created": now - 90, "launched": now - 90, "started": now - 80, "ended": now - 5, "state": "completed"}
    list_run(home, run_id, run, name=name, environment=name, **{**times, **values})
    return run
