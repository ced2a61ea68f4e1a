"""The records of runs keep what many processes write at once, and the index finds them again when it is lost."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listed_runs import list_run

from palestra.core.config import RunConfig
from palestra.core.errors import NotFoundError, StorageError
from palestra.core.run_folder import RunFolder
from palestra.runs.index import Index, PartRow
from palestra.runs.manager import RunManager
from palestra.runs.processes import Process, this_process


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "home")


def test_a_state_changes_only_from_where_it_may(index):
    list_run(index, "a")
    assert not index.move("a", ["running"], "completed")
    assert index.move("a", ["pending", "starting"], "stopped", reason="why")
    assert (index.row("a").state, index.row("a").reason) == ("stopped", "why")
    list_run(index, "b", state="failed")
    assert [index.move("b", ["failed"], "pending") for _ in range(2)] == [True, False], "one of two gets to resume"


def test_a_supervisor_of_an_earlier_launch_changes_nothing(index):
    list_run(index, "a", launched=1.0, state="failed")
    assert not index.move("a", ["failed"], "completed", of_launch=2.0)
    assert index.move("a", ["failed"], "completed", of_launch=1.0)


def test_the_newest_run_comes_first_and_an_unknown_one_is_answered_with_the_closest(index):
    for name in ("a", "b", "abcd2345"):
        list_run(index, name)
    assert [row.run_id for row in index.rows()] == ["abcd2345", "b", "a"]
    assert [row.run_id for row in index.rows(limit=1, offset=1)] == ["b"]
    with pytest.raises(NotFoundError, match=r"no run 'abcd2346'\. Did you mean 'abcd2345'"):
        index.row("abcd2346")


def test_only_a_run_that_has_ended_is_removed_and_till_then_its_processes_are_known(index):
    me = this_process()
    list_run(index, "a", state="running", pid=me.pid, born=me.born)
    index.update("a", parts={"trainer": PartRow(Process(7, "then"), -9)})
    assert index.row("a").parts == {"trainer": PartRow(Process(7, "then"), -9)}
    assert not index.remove("a")
    index.move("a", ["running"], "stopped")
    assert index.remove("a")
    assert index.rows() == []


WRITER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from palestra.runs.index import Index

def write(number):
    index = Index(Path(sys.argv[1]))
    run_id = f"{sys.argv[2]}{number}"
    folder = Path(sys.argv[1]).parent / run_id
    folder.mkdir()
    index.add(run_id=run_id, name="n", environment="e", folder=str(folder), kind="managed", state="pending",
              created=0.0, launched=0.0, host="here")
    for port in range(20):
        index.update(run_id, ports={"api": port})
    return index.move(run_id, ["pending"], "completed")

with ThreadPoolExecutor(5) as pool:
    assert all(pool.map(write, range(5)))
"""


def test_two_processes_with_five_writers_each_do_not_clash(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "home"), name], stderr=subprocess.PIPE)
        for name in ("one", "other")
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors.decode()
    rows = Index(tmp_path / "home").rows()
    assert {(row.state, row.ports["api"]) for row in rows} == {("completed", 19)}
    assert len({row.run_id for row in rows}) == 10


def test_a_home_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="PALESTRA_HOME"):
        Index(tmp_path / "file" / "home")


def test_a_dead_run_is_read_as_failed_or_stopped_and_recorded_when_it_is_cleaned_up(index):
    dead = {"pid": 2**22, "born": "then"}
    list_run(index, "a", state="running", **dead)
    list_run(index, "b", state="stopping", **dead)
    list_run(index, "c", state="stopping", reason="the trainer was killed", **dead)
    list_run(index, "d", launched=time.time() - 60)
    list_run(index, "e", state="running", host="elsewhere", **dead)
    rows = {row.run_id: (row.state, str(row.reason)) for row in index.rows()}
    assert {run_id: state for run_id, (state, _) in rows.items()} == {
        "a": "failed", "b": "stopped", "c": "failed", "d": "failed", "e": "running",
    }  # fmt: skip
    assert rows["c"][1].startswith("the trainer was killed; then its supervisor has died; continue it with")
    recorded = index.record_of(Path(index.row("a").folder))
    assert recorded is not None
    assert recorded.state == "running"
    assert sorted(index.end_dead_runs()) == ["a", "b", "c", "d"]
    assert {row.run_id: (row.state, str(row.reason)) for row in index.rows()} == rows
    assert index.end_dead_runs() == []


def test_a_run_of_0_2_0_is_listed_from_its_folder_and_can_be_resumed(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "runs.db").write_bytes(b"SQLite format 3\0")
    folders = [RunFolder.create(tmp_path, name, RunConfig(), {}, at=tmp_path / "old" / name) for name in ("a", "b")]
    (home / "folders.txt").write_text("".join(f"{folder.path}\n" for folder in folders))
    about = {"run_id": "abcd2345", "name": "clerk", "environment": "e", "kind": "managed", "created": 5.0}
    folders[0].index_file.write_text(json.dumps({**about, "gpus": 0, "memory_gib": 1.0}))
    folders[1].model.mkdir()
    monkeypatch.setattr(RunManager, "_launch", lambda manager, run_id, folder: None)
    manager = RunManager(home)
    assert [(run.name, run.state) for run in manager.list()] == [("b", "completed"), ("clerk", "stopped")]
    assert manager.lists(folders[0])
    assert manager.resume("abcd2345").state == "pending"
