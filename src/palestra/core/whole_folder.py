"""Folders that are whole or not there at all, each with a manifest of its files (size and SHA-256).

They are written aside, flushed to disk and renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.core.run_folder import MANIFEST


def write_whole(folder: Path, write: Callable[[Path], None]) -> Path:
    """Make the folder of what `write` puts into the path that it is given; an older one is replaced."""
    aside = folder_aside(folder)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = sorted(p for p in aside.rglob("*") if p.is_file())
        manifest = {str(p.relative_to(aside)): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path in [*files, aside / MANIFEST, aside]:
            _flush(path)
        _replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def folder_aside(folder: Path) -> Path:
    """Where the folder is written before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def check_whole(folder: Path) -> None:
    """Compare every file with the manifest; PalestraError names the first that is not as it was written."""
    if not (folder / MANIFEST).is_file():
        raise PalestraError(f"{folder} is not a checkpoint: it has no {MANIFEST}")
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text()))
        expected_files = {str(name): (int(row["bytes"]), str(row["sha256"])) for name, row in manifest.items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise PalestraError(f"{folder / MANIFEST} is corrupt") from None
    for name, expected in expected_files.items():
        path = folder / name
        if not path.is_file():
            raise PalestraError(f"the checkpoint {folder} lacks its file {name}")
        if (path.stat().st_size, _digest(path)) != expected:
            raise PalestraError(f"the checkpoint file {path} is corrupt (its checksum differs)")


def _replace(aside: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
