"""The runs that a dashboard shows: those of the index, or those at a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.index import UnknownRun, id_of, run_folders
from palestra.runs.manager import Run, RunManager


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
