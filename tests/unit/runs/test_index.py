"""The index keeps what many processes write at once, and lets in only what has room."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from listed_runs import list_run

from palestra.core.errors import NotFoundError, ResourceError, StorageError
from palestra.runs.index import Index
from palestra.runs.processes import Process


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "home")


def test_a_state_changes_only_from_where_it_may(index):
    list_run(index, "a")
    assert not index.move("a", ["running"], "completed")
    assert index.move("a", ["pending", "starting"], "running", reason="why")
    assert (index.row("a").state, index.row("a").reason) == ("running", "why")
    list_run(index, "b", state="failed")
    assert [index.move("b", ["failed"], "pending") for _ in range(2)] == [True, False], "one of two gets to resume"


def test_the_newest_run_comes_first_and_an_unknown_one_is_answered_with_the_closest(index):
    for name in ("a", "b", "abcd2345"):
        list_run(index, name)
    assert [row.run_id for row in index.rows()] == ["abcd2345", "b", "a"]
    with pytest.raises(NotFoundError, match=r"no run 'abcd2346'\. Did you mean 'abcd2345'"):
        index.row("abcd2346")


def test_ports_of_runs_differ_and_are_free_again_afterwards(index):
    for name in ("a", "b"):
        list_run(index, name, state="starting")
    ports = [index.claim_port(run, part) for run in ("a", "b") for part in ("api", "trainer")]
    assert len(set(ports)) == 4
    assert index.ports("a") == {"api": ports[0], "trainer": ports[1]}
    index.move("a", ["starting"], "failed")
    assert index.ports("a") == {}


def test_a_port_that_somebody_listens_on_is_not_taken(index, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
        other.close()
        list_run(index, "a")
        monkeypatch.setattr("palestra.runs.index._PORTS", [taken.getsockname()[1], free])
        assert index.claim_port("a", "api") == free
        with pytest.raises(ResourceError, match="no loopback port"):
            index.claim_port("a", "trainer")


def test_runs_wait_for_room_in_the_order_of_their_coming(index):
    for name in ("a", "b", "c"):
        list_run(index, name)

    def admit(name: str) -> str | None:
        return index.admit(name, free_memory_gib=100.0, machine_gpus=0, default_runs=1)

    assert "run a is before it" in str(admit("b"))
    assert admit("a") is None
    assert index.row("a").state == "starting"
    assert admit("b") == index.row("b").reason == "1 of at most 1 runs are running"
    index.move("a", ["starting"], "completed")
    assert "run b is before it" in str(admit("c"))
    assert admit("b") is None
    assert index.row("b").reason is None


def test_a_run_waits_for_memory_unless_it_is_alone(index):
    list_run(index, "a", memory_gib=10.0)
    assert index.admit("a", 5.0, machine_gpus=0, default_runs=4) is None
    list_run(index, "b", memory_gib=10.0)
    assert "needs about 10.0 GiB" in str(index.admit("b", 5.0, machine_gpus=0, default_runs=4))


def test_only_a_run_that_has_ended_is_forgotten_and_till_then_its_processes_are_known(index):
    list_run(index, "a", state="running")
    index.part_started("a", "trainer", Process(7, "then"))
    index.part_ended("a", "trainer", -9)
    (part,) = index.parts("a")
    assert (part.part, part.process, part.exit_code) == ("trainer", Process(7, "then"), -9)
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
    run_id = f"{sys.argv[2]}-{number}"
    index.add(run_id=run_id, name="n", environment="e", folder=run_id, kind="managed", state="pending",
              created=0.0, launched=0.0, host="here")
    for _ in range(20):
        index.claim_port(run_id, "api")
        index.update(run_id, heartbeat=1.0)
    return index.move(run_id, ["pending"], "running")

with ThreadPoolExecutor(5) as pool:
    assert all(pool.map(write, range(5)))
"""


def test_two_processes_with_five_writers_each_do_not_clash(tmp_path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "home"), name], stderr=subprocess.PIPE)
        for name in ("one", "other")
    ]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors.decode()
    index = Index(tmp_path / "home")
    assert {row.state for row in index.rows()} == {"running"}
    assert len(index.rows()) == 10
    assert len({index.ports(row.run_id)["api"] for row in index.rows()}) == 10


def test_a_home_that_cannot_be_made_is_told_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="PALESTRA_HOME"):
        Index(tmp_path / "file" / "home")


def test_each_run_gets_a_gpu_of_its_own_and_one_without_passes_those_that_wait(index):
    devices = ["0", "GPU-7f"]
    for name in ("a", "b", "c", "cpu"):
        list_run(index, name, gpus=0 if name == "cpu" else 1)
        index.admit(name, 8.0, 2, 9, devices)
    assert {name: index.gpus(name) for name in ("a", "b", "c", "cpu")} == {
        "a": ["0"], "b": ["GPU-7f"], "c": [], "cpu": [],
    }  # fmt: skip
    assert (index.row("c").state, index.row("cpu").state) == ("pending", "starting")
    index.move("a", ["starting"], "completed")
    assert index.admit("c", 8.0, 2, 9, devices) is None
    assert index.gpus("c") == ["0"]


def test_a_run_gets_as_many_gpus_as_it_asks_for_and_waits_until_they_are_free(index):
    devices = ["0", "1", "2", "3"]

    def admit(run: str) -> str | None:
        return index.admit(run, 100.0, len(devices), 9, devices)

    for name, gpus in {"a": 1, "b": 2, "c": 2, "d": 1}.items():
        list_run(index, name, gpus=gpus)
    assert [admit(name) for name in "ab"] == [None, None]
    assert admit("c") == "3 of 4 GPUs are in use"
    assert admit("d") == "run c is before it"  # it would fit: but then c might wait for ever
    index.move("a", ["starting"], "completed")
    assert admit("c") is None
    assert {name: index.gpus(name) for name in "bc"} == {"b": ["1", "2"], "c": ["0", "3"]}
    assert admit("d") == "4 of 4 GPUs are in use"


def test_gpus_are_held_again_by_their_runs_when_the_index_was_lost(index):
    devices = ["0", "1"]
    for name in ("a", "b"):
        list_run(index, name, gpus=1)
    assert index.admit("a", 100.0, 2, 9, devices) is None
    row, held = index.row("a"), index.gpus("a")
    for path in index.path.parent.glob("runs.db*"):
        path.unlink()
    index.keep(row, held)
    list_run(index, "c", gpus=1)
    assert index.admit("c", 100.0, 2, 9, devices) is None
    assert (index.gpus("a"), index.gpus("c")) == (["0"], ["1"])
