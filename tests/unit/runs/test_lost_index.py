"""An index that is lost, damaged or locked ends no run, and is made again from the run folders; and a supervisor's
patience with a trainer that has to end."""

import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from listed_runs import list_run

from palestra.cli.find_run import require_run_id
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs import index as index_module
from palestra.runs import reader
from palestra.runs.index import Index, UnknownRun, listed
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.processes import hold, this_process
from palestra.runs.reader import RunReader
from palestra.runs.supervisor import Supervisor


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Three runs: one has a model, one was stopped, one is being trained by this process."""
    index, me = Index(tmp_path / "home"), this_process()
    for number, run_id in enumerate(("complete", "stopped2", "training")):
        folder = RunFolder.create(tmp_path, run_id, RunConfig(), {}, at=tmp_path / "elsewhere" / run_id)
        state = {"complete": "completed", "stopped2": "stopped"}.get(run_id, "running")
        list_run(index, run_id, folder, state=state, pid=me.pid, born=me.born, created=float(number))
        if run_id == "complete":
            folder.model.mkdir()
    return index.path.parent


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return RunFolder.create(tmp_path, "mine", RunConfig(), {}, at=tmp_path / "mine").path


def lose(home: Path, how: str) -> None:
    path = home / "runs.txt"
    match how:
        case "deleted":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "garbage":
            path.write_bytes(b"\xff" * 1000)


EXPECTED = [("training", "running"), ("stopped2", "stopped"), ("complete", "completed")]


@pytest.mark.parametrize("how", ["deleted", "garbage", "empty"])
def test_the_index_is_made_again_from_the_folders(home: Path, how: str) -> None:
    lose(home, how)
    before = sorted(home.iterdir())
    assert [(run.run_id, run.state) for run in RunReader(home).list()] == EXPECTED
    assert sorted(home.iterdir()) == before, "reading wrote nothing"
    assert [(row.run_id, row.state) for row in Index(home).rows()] == EXPECTED
    assert len((home / "runs.txt").read_text().splitlines()) == 4


def test_a_run_without_its_record_is_listed_by_its_other_files(home: Path, tmp_path: Path) -> None:
    for name, _ in EXPECTED:
        (tmp_path / "elsewhere" / name / "index.json").unlink()
    with hold(tmp_path / "elsewhere" / "training"):
        rows = Index(home).rows()
    assert [(row.name, row.state) for row in rows] == EXPECTED
    assert rows[0].supervisor == this_process()


def test_a_folder_that_another_home_or_path_has_recorded_is_not_found_as_an_own_run(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = RunFolder.create(tmp_path, "theirs", RunConfig(), {}, at=tmp_path / "runs" / "theirs")
    list_run(tmp_path / "other_home", "theirs22", other, state="completed")
    shutil.copytree(tmp_path / "elsewhere" / "complete", tmp_path / "runs" / "copy")
    lose(home, "deleted")
    assert [row.run_id for row in Index(home).rows()] == [run_id for run_id, _ in EXPECTED]
    assert not RunReader(home).lists(other)


@pytest.mark.parametrize("how", ["garbage", "deleted"])
def test_a_run_in_a_terminal_goes_on_when_the_index_is_lost(home, mine, monkeypatch, how):
    monkeypatch.setenv("PALESTRA_HOME", str(home))
    with listed(mine):
        lose(home, how)
    [row] = [row for row in Index(home).rows() if row.folder == str(mine)]
    assert row.state == "completed"


def test_a_run_in_a_terminal_trains_while_the_index_is_locked_and_where_there_can_be_none(home, mine, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(home))
    monkeypatch.setattr(index_module, "_LOCK_S", 0.05)
    trained = 0
    with FileLock(home / "runs.lock"), listed(mine):
        trained += 1
    monkeypatch.setenv("PALESTRA_HOME", "/dev/null/x")
    with listed(mine):
        trained += 1
    assert trained == 2


def test_many_runs_are_listed_by_the_page_without_reading_the_others(tmp_path, monkeypatch):
    index = Index(tmp_path)
    list_run(index, "r0", state="completed")
    record = json.loads((tmp_path / "runs" / "r0" / "index.json").read_text())
    folders = [tmp_path / "runs" / f"r{i}" for i in range(500)]
    for folder in folders[1:]:
        folder.mkdir()
        values = record | {"run_id": folder.name, "seal": index._seal(folder)}
        (folder / "index.json").write_text(json.dumps(values))
    index._write_list(folders)
    read, reads = [], index_module.read_regular
    monkeypatch.setattr(index_module, "read_regular", lambda path: read.append(path) or reads(path))
    runs, count = RunReader(tmp_path).page(20)
    assert (len(runs), count, runs[0].run_id, len(read)) == (20, 500, "r499", 20)
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path))
    shown, read_run = [], reader.read_run
    monkeypatch.setattr(reader, "read_run", lambda row: shown.append(row.run_id) or read_run(row))
    assert RunReader(tmp_path).get(require_run_id("r123")).run_id == "r123"
    with pytest.raises(UnknownRun, match="there is no run 'nobody'") as refused:
        RunReader(tmp_path).get(require_run_id("nobody"))
    assert len(str(refused.value)) < 300
    assert shown == ["r123"]


def test_a_run_is_resumed_by_its_id_after_the_index_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(RunManager, "_launch", lambda manager, run_id, folder: launched.append(folder.path))
    manager = RunManager(tmp_path / "home")
    run = manager.start(RunRequest(environment="calculator"))
    Index(manager.home).move(run.run_id, ["pending"], "failed")
    lose(manager.home, "deleted")
    assert RunManager(manager.home).resume(run.run_id).state == "pending"
    assert launched == [run.folder] * 2


def test_a_supervisor_tries_again_while_the_disk_is_full_and_writes_a_lost_record(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.runs.supervisor._RETRY_S", 0.0)
    supervisor = Supervisor.__new__(Supervisor)
    supervisor._index, supervisor._folder = Index(tmp_path / "home"), RunFolder(tmp_path / "run")
    list_run(supervisor._index, "abcd", supervisor._folder)
    supervisor._row = supervisor._index.row("abcd")
    supervisor._folder.index_file.write_text("{")
    errors = iter([OSError(28, "No space left on device"), UnknownRun("there is no run")])

    def read() -> str:
        if error := next(errors, None):
            raise error
        return supervisor._index.row("abcd").run_id

    assert supervisor._retry(read) == "abcd"
    assert supervisor._index.record_of(supervisor._folder.path) == supervisor._row
    supervisor._folder.index_file.unlink()
    supervisor._folder.path.rmdir()
    assert supervisor._retry(read) is None


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
