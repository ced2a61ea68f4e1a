"""The index from the run folders, where it was lost or damaged: each folder knows its run, a list knows the folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.files import read_regular, write_json
from palestra.core.run_folder import RunFolder
from palestra.runs.folder_lock import holder
from palestra.runs.processes import this_host

REBUILT = "the index of runs was lost; this was read from the run folder"
_KEPT = ("run_id", "name", "environment", "kind", "created", "gpus", "memory_gib")
_RUN_ID = re.compile(r"[a-z0-9]{1,64}")
_FOLDERS = "folders.txt"  # one path a line, of every run that was ever added


def remember(home: Path, row: Mapping[str, Any]) -> None:
    """Note a new run, so that `rows_from_folders` finds it."""
    with contextlib.suppress(OSError):
        write_json(RunFolder(Path(row["folder"])).index_file, {name: row[name] for name in _KEPT if name in row})
        with (home / _FOLDERS).open("a", encoding="utf-8") as file:
            file.write(f"{row['folder']}\n")


def rows_from_folders(home: Path) -> Iterator[dict[str, Any]]:
    """A row for each run folder that is known and still there, the oldest first."""
    rows: dict[str, dict[str, Any]] = {}
    for path in dict.fromkeys([*_listed(home), *sorted((home / "runs").glob("*"))]):
        with contextlib.suppress(OSError, ValueError, PalestraError, KeyError):
            row = row_from_folder(RunFolder(path))
            rows.setdefault(row["run_id"], row)
    yield from sorted(rows.values(), key=lambda row: row["created"])


def _listed(home: Path) -> list[Path]:
    try:
        return [Path(line) for line in (home / _FOLDERS).read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return []


def row_from_folder(folder: RunFolder) -> dict[str, Any]:
    """What the folder itself says of its run."""
    known = _known(folder)
    record = folder.record if folder.has_begun else json.loads(folder.request_file.read_text())
    process = holder(folder.path)
    files = [path for path in (folder.metrics_file, folder.config_file, folder.path) if path.exists()]
    changed = files[0].stat().st_mtime
    created = known.get("created") or _time_of(record.get("created")) or files[-1].stat().st_mtime
    row = {
        "run_id": id_of(folder.path), "name": str(record.get("name") or folder.path.name), "environment": "",
        "folder": str(folder.path), "kind": "foreground", "reason": REBUILT, "created": created,
        "launched": created, "started": created, "host": this_host(),
    }  # fmt: skip
    row |= known
    if process is None:
        return row | {"state": "completed" if folder.model.is_dir() else "stopped", "ended": changed}
    # its supervisor, if it has one, says so with its next heartbeat
    return row | process | {"state": "running", "kind": "foreground"}


def _known(folder: RunFolder) -> dict[str, Any]:
    """The valid values of index.json; the file may come from somebody else."""
    try:
        values = json.loads(read_regular(folder.index_file)) if folder.index_file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: values[name] for name in _KEPT if _is_valid(name, values.get(name))} if type(values) is dict else {}


def _is_valid(name: str, value: Any) -> bool:
    match name:
        case "run_id":
            return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None
        case "name" | "environment":
            return isinstance(value, str)
        case "kind":
            return value in ("managed", "foreground")
        case "gpus":
            return type(value) is int and 0 <= value < 2**31
        case _:
            return type(value) in (int, float) and abs(value) < 2**53 and math.isfinite(value)


def _time_of(stamp: Any) -> float | None:
    """Seconds since the epoch, of a run.json's own time."""
    try:
        return time.mktime(time.strptime(str(stamp), "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return None


def id_of(folder: Path) -> str:
    """An id from the folder's path, always the same: for folders without an id, or with one of another folder."""
    return hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()
