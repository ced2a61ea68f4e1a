"""The run that a person means by a folder or a name."""

from __future__ import annotations

from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.runs.store import RunFolder

RUNS = Path("runs")
LISTED = 5


def find_run(name: str) -> RunFolder:
    """A run by its folder, or by its name in ./runs."""
    for path in (Path(name), RUNS / name):
        if path.is_dir():
            return RunFolder.open(path)
    recent = recent_runs()
    if not recent:
        raise PalestraError(f"there is no run {name}, and ./{RUNS} has none; `palestra train` starts one")
    listing = "".join(f"\n  {path}" for path in recent)
    raise PalestraError(f"there is no run {name}. The most recent ones in ./{RUNS} are:{listing}")


def model_of(name: str) -> tuple[str, Path]:
    """The model that is meant by a run or by a model's own name, and the folder for what is made of it."""
    for path in (Path(name).expanduser(), RUNS / name):
        if (path / "run.json").is_file():
            run = RunFolder.open(path)
            if not run.model.is_dir():
                raise PalestraError(
                    f"the run {path} has no trained model yet; `palestra train --resume {path}` goes on"
                )
            return str(run.model), run.path / "export"
    folder = Path(name).expanduser()
    is_of_run = folder.name == "model" and (folder.parent / "run.json").is_file()
    return name, folder.parent / "export" if is_of_run else Path("export")


def recent_runs() -> list[Path]:
    """The newest run folders of ./runs, newest first."""
    records = sorted(RUNS.glob("*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [record.parent for record in records[:LISTED]]
