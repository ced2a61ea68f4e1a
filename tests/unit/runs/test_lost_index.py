"""An index that is lost, damaged or locked ends no run, and is made again from the run folders; and a supervisor's
patience with a trainer that has to end."""

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from listed_runs import list_run

from palestra.cli.find_run import require_run_id
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs import reader
from palestra.runs.database import REBUILT
from palestra.runs.folder_lock import hold
from palestra.runs.foreground import listed
from palestra.runs.index import Index, UnknownRun
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.processes import this_process
from palestra.runs.reader import RunReader
from palestra.runs.supervisor import Supervisor, patiently


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


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return RunFolder.create(tmp_path, "mine", RunConfig(), {}, at=tmp_path / "mine").path


def lose(home: Path, how: str) -> None:
    path = home / "runs.db"
    if how == "deleted":
        for file in home.glob("runs.db*"):
            file.unlink()
        return
    content = path.read_bytes()
    damaged = content[:4096] + b"\xff" * (len(content) - 4096)
    path.write_bytes({"garbage": b"garbage" * 1000, "empty": b"", "damaged": damaged}[how])


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
    assert index.row("stopped2") == replace(mine, number=index.row("stopped2").number)
    index.move("stopped2", ["running"], "stopping")
    index.keep(mine)
    assert index.row("stopped2").state == "stopping"  # what others ask for stays


def test_a_supervisor_waits_for_an_index_that_is_locked(monkeypatch) -> None:
    failures = [sqlite3.OperationalError("database is locked"), OSError(28, "No space left on device")]
    monkeypatch.setattr("palestra.runs.supervisor._INDEX_RETRY_S", 0.0)
    assert patiently(Mock(side_effect=[*failures, "done"])) == "done"


@pytest.mark.parametrize("how", ["garbage", "deleted"])
def test_a_run_in_a_terminal_goes_on_when_the_index_is_lost(home, mine, monkeypatch, how):
    monkeypatch.setenv("PALESTRA_HOME", str(home))
    with listed(mine):
        lose(home, how)
    [row] = [row for row in Index(home).rows() if row.folder == str(mine)]
    assert row.state == "completed"


def test_a_run_in_a_terminal_trains_while_the_index_is_locked_and_where_there_can_be_none(home, mine, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(home))
    monkeypatch.setattr("palestra.runs.database._BUSY_S", 0.05)
    trained = 0
    with closing(sqlite3.connect(home / "runs.db", isolation_level=None)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        with listed(mine):
            trained += 1
    monkeypatch.setenv("PALESTRA_HOME", "/dev/null/x")
    with listed(mine):
        trained += 1
    assert trained == 2


def test_five_thousand_runs_are_listed_by_the_page_and_one_is_found_without_reading_the_others(tmp_path, monkeypatch):
    now = time.time()
    with Index(tmp_path)._database.change() as db:
        db.executemany(
            "INSERT INTO runs (run_id, name, environment, folder, kind, state, created, launched, host) "
            "VALUES (?, 'n', 'e', ?, 'managed', 'completed', ?, ?, 'h')",
            [(f"r{i}", f"/runs/{i}", now, now) for i in range(5000)],
        )
    runs, count = RunReader(tmp_path).page(20)
    assert (len(runs), count, runs[0].run_id) == (20, 5000, "r4999")
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


@pytest.mark.parametrize(
    ("train_seconds", "patience_s"), [([], 120.0), ([2.0, 3.0], 39.0), ([100.0, 20.0], 330.0), ([1e6], 600.0)]
)
def test_a_trainer_has_as_long_as_three_of_its_steps(tmp_path, train_seconds, patience_s):
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._folder = RunFolder.create(tmp_path, "run", RunConfig(), {}, at=tmp_path / "run")
    rows = [{"step": i, "train_seconds": seconds} for i, seconds in enumerate(train_seconds)]
    supervisor._folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert supervisor._patience_s("trainer") == patience_s
    assert supervisor._patience_s("env") == 10.0
