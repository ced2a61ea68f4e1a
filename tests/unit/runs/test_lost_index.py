"""An index that is lost, damaged or locked ends no run, and is made again from the run folders."""

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from listed_runs import list_run

from palestra.cli.find_run import require_run_id
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs import reader
from palestra.runs.database import REBUILT
from palestra.runs.folder_lock import hold
from palestra.runs.foreground import listed
from palestra.runs.index import Index, Row, UnknownRun
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.processes import this_process
from palestra.runs.reader import RunReader
from palestra.runs.supervisor import patiently


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Three runs: one has a model, one was stopped, one is being trained by this process."""
    index = Index(tmp_path / "home")
    for run_id in ("complete", "stopped2", "training"):
        folder = RunFolder.create(tmp_path, run_id, RunConfig(), {}, at=tmp_path / "elsewhere" / run_id)
        list_run(index, run_id, folder, state="running")
        if run_id == "complete":
            folder.model.mkdir()
    return index.path.parent


def lose(home: Path, how: str) -> None:
    path = home / "runs.db"
    if how == "deleted":
        for file in home.glob("runs.db*"):
            file.unlink()
    elif how == "garbage":
        path.write_bytes(b"garbage" * 1000)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        content = bytearray(path.read_bytes())
        content[4096:] = b"\xff" * (len(content) - 4096)
        path.write_bytes(content)


@pytest.mark.parametrize("how", ["deleted", "garbage", "empty", "damaged"])
def test_the_index_is_made_again_from_the_folders(home: Path, tmp_path: Path, how: str) -> None:
    with sqlite3.connect(home / "runs.db") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    lose(home, how)
    with hold(tmp_path / "elsewhere" / "training"):
        expected = [("training", "running"), ("stopped2", "stopped"), ("complete", "completed")]
        assert [(run.run_id, run.state) for run in RunReader(home).list()] == expected
        assert not (home / "damaged-runs.db").exists()  # reading wrote nothing
        rows = Index(home).rows()
    assert [(row.run_id, row.state) for row in rows] == expected
    assert (rows[0].pid, rows[0].name, rows[0].reason) == (this_process().pid, "name of training", REBUILT)
    assert (home / "damaged-runs.db").exists() is (how != "deleted")
    assert [row.run_id for row in Index(home).rows()] == [name for name, _ in expected]


def test_a_supervisor_lists_its_run_again(home: Path) -> None:
    index = Index(home)
    mine = index.row("stopped2")
    lose(home, "deleted")
    assert index.row("stopped2").state == "stopped"  # what the folder says
    index.keep(mine)
    assert index.row("stopped2") == Row(**{**_values(mine), "number": index.row("stopped2").number})
    index.move("stopped2", ["running"], "stopping")
    index.keep(mine)
    assert index.row("stopped2").state == "stopping"  # what others ask for stays


def _values(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def test_a_supervisor_waits_for_an_index_that_is_locked() -> None:
    answers = iter([sqlite3.OperationalError("database is locked"), OSError(28, "No space left on device"), "done"])

    def call() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("palestra.runs.supervisor._INDEX_RETRY_S", 0.0)
        assert patiently(call) == "done"


@pytest.mark.parametrize("how", ["garbage", "deleted"])
def test_a_run_in_a_terminal_goes_on_when_the_index_is_lost(home, tmp_path, monkeypatch, how):
    monkeypatch.setenv("PALESTRA_HOME", str(home))
    folder = RunFolder.create(tmp_path, "mine", RunConfig(), {}, at=tmp_path / "mine")
    with listed(folder.path):
        lose(home, how)
    [row] = [row for row in Index(home).rows() if row.folder == str(folder.path)]
    assert row.state == "completed"


def test_a_run_in_a_terminal_goes_on_while_the_index_is_locked(home, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(home))
    monkeypatch.setattr("palestra.runs.database._BUSY_S", 0.05)
    folder = RunFolder.create(tmp_path, "mine", RunConfig(), {}, at=tmp_path / "mine")
    lock = sqlite3.connect(home / "runs.db", isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    with listed(folder.path):
        trained = True
    lock.close()
    assert trained


def test_a_run_trains_where_there_can_be_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_HOME", "/dev/null/x")
    folder = RunFolder.create(tmp_path, "mine", RunConfig(), {}, at=tmp_path / "mine")
    with listed(folder.path):
        pass


def many_runs(index: Index) -> None:
    now = time.time()
    with index._database.change() as db:
        db.executemany(
            "INSERT INTO runs (run_id, name, environment, folder, kind, state, created, launched, host) "
            "VALUES (?, 'n', 'e', ?, 'managed', 'completed', ?, ?, 'h')",
            [(f"r{i}", f"/runs/{i}", now, now) for i in range(5000)],
        )


def test_five_thousand_runs_are_listed_by_the_page(tmp_path: Path) -> None:
    many_runs(Index(tmp_path))
    runs, count = RunReader(tmp_path).page(20)
    assert (len(runs), count, runs[0].run_id) == (20, 5000, "r4999")


def test_one_of_five_thousand_runs_is_found_without_reading_the_others(tmp_path, monkeypatch):
    many_runs(Index(tmp_path))
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path))
    read, reads = [], reader.read_run
    monkeypatch.setattr(reader, "read_run", lambda index, row: read.append(row.run_id) or reads(index, row))
    assert RunReader(tmp_path).get(require_run_id("r1234")).run_id == "r1234"
    with pytest.raises(UnknownRun, match="there is no run 'nobody'") as refused:
        RunReader(tmp_path).get(require_run_id("nobody"))
    assert len(str(refused.value)) < 300
    assert read == ["r1234"]


def test_a_run_is_resumed_by_its_id_after_the_index_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(RunManager, "_launch", lambda manager, run_id, folder: launched.append(folder.path))
    manager = RunManager(tmp_path / "home")
    run = manager.start(RunRequest(environment="calculator"))
    Index(manager.home).move(run.run_id, ["pending"], "failed")
    lose(manager.home, "deleted")
    assert RunManager(manager.home).resume(run.run_id).state == "pending"
    assert launched == [run.folder] * 2
