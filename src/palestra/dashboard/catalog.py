"""The runs that a dashboard shows: those of the index, or those at a path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.runs.index import UnknownRun, id_of, run_folders
from palestra.runs.manager import Run, RunManager


@dataclass(frozen=True, slots=True)
class CatalogRun:
    """A run with its folder. `source` is the tool that made it; a foreign run was converted into our format."""

    run: Run
    folder: RunFolder
    source: str = "palestra"
    listed: bool = True  # in the index, so that it can be stopped, resumed and deleted

    @property
    def id(self) -> str:
        return self.run.run_id


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A foreign run, converted."""

    folder: RunFolder
    source: str
    refresh: Callable[[], None] = lambda: None  # converts it again if its files have changed


class Catalog:
    """Finds runs. With `folders` or `imported` it shows these alone."""

    def __init__(
        self,
        manager: RunManager,
        folders: Sequence[RunFolder] | None = None,
        imported: Sequence[ImportedRun] = (),
        *,
        trust: bool = False,
    ) -> None:
        self.manager = manager
        self.trust_words = ["--trust"] if trust else []  # for commands that run code which a folder names
        self._folders = folders
        self._imported = {str(each.folder.path): each for each in imported}

    def all(self) -> list[CatalogRun]:
        """Newest first."""
        if self._folders is None and not self._imported:
            runs = [CatalogRun(run, RunFolder(run.folder)) for run in self.manager.list()]
            known = {run.folder.path for run in runs}
            below = (folder for folder in run_folders(Path("runs")) if folder.has_begun)
            runs += [self._unlisted(folder) for folder in below if folder.path not in known]
        else:
            folders = [*(self._folders or ()), *(each.folder for each in self._imported.values())]
            runs = [self._unlisted(folder) for folder in folders if folder.has_begun]
        runs = list(_with_own_ids(runs))
        return sorted(runs, key=lambda found: found.run.created, reverse=True)

    def get(self, run_id: str) -> CatalogRun:
        if self._folders is None and not self._imported:
            try:
                run = self.manager.get(run_id)
                return CatalogRun(run, RunFolder(run.folder))
            except UnknownRun as error:
                reason: PalestraError = error
        else:
            reason = UnknownRun(f"there is no run {run_id[:80]!r} here")
        found = next((found for found in self.all() if found.id == run_id), None)
        if found is None:
            raise reason
        if found.source != "palestra":
            self._imported[str(found.folder.path)].refresh()
        return found

    def _unlisted(self, folder: RunFolder) -> CatalogRun:
        run = self.manager.of_folder(folder)
        imported = self._imported.get(str(folder.path))
        if imported is not None:
            return CatalogRun(replace(run, state="completed"), folder, imported.source, listed=False)
        return CatalogRun(run, folder, listed=self.manager.lists(folder))


def _with_own_ids(runs: Sequence[CatalogRun]) -> Iterator[CatalogRun]:
    """The runs, each with an id of its own: copies of a folder hold the same id."""
    seen: set[str] = set()
    for found in sorted(runs, key=lambda found: not found.listed):  # the index's ids stay as they are
        if found.id in seen:
            found = replace(found, run=replace(found.run, run_id=id_of(found.folder.path)))
        seen.add(found.id)
        yield found
