"""`palestra runs`: what trains here, looked after from any terminal."""

import json
import os
import shutil
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from listed_runs import ended_run

from palestra.cli.main import COMMANDS
from palestra.cli.main import cli as commands
from palestra.core.config import RunConfig
from palestra.runs.index import Index
from palestra.runs.processes import this_process

AddRun = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def add_run(home: Path, tmp_path: Path) -> AddRun:
    """Lists a run that has ended, with the files that it would have."""

    def add(run_id: str, rewards: list[float], state: str = "completed", **more: Any) -> Path:
        config = RunConfig.build({"train.learning_rate": 1e-3 / (1 + len(run_id))}, more.pop("settings", {}))
        path = tmp_path / "runs" / run_id
        run = ended_run(home, path, run_id, config=config, record={"source": None}, state=state, **more)
        rows = [{"step": i + 1, "reward_mean": r, "pass_rate": r, "loss": -0.1} for i, r in enumerate(rewards)]
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run.path / "logs").mkdir()
        (run.path / "logs" / "trainer.log").write_text("one\ntwo\nthree\n")
        return run.path

    return add


def test_no_runs_yet_says_how_to_start_one_and_looking_makes_no_index(cli, home):
    assert "palestra train --detach" in cli("runs", "list").out
    assert cli.json("runs", "list") == {"runs": [], "count": 0}
    assert cli("runs", "show", "nosuch").code == 2
    assert ShellComplete(commands, {}, "palestra", "_PALESTRA_COMPLETE").get_completions(["runs", "show"], "") == []
    assert not home.exists()


def test_runs_are_listed_with_their_numbers_newest_first(cli, add_run, monkeypatch):
    add_run("aaaa2222", [0.25])
    add_run("bbbb3333", [0.25, 0.75], state="failed", reason="the trainer was killed")
    lines = cli("runs", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "bbbb3333", "aaaa2222"]
    assert lines[1].split()[:6] == ["bbbb3333", "clerk", "failed", "2", "0.75", "75%"]
    data = cli.json("runs", "list")
    assert data["count"] == 2
    assert data["runs"][0]["reason"] == "the trainer was killed"
    assert data["runs"][0]["progress"]["reward_mean"] == 0.75
    for columns, has_size in (("80", False), ("140", True)):  # a narrow terminal keeps the names
        monkeypatch.setenv("COLUMNS", columns)
        heading, row, _ = cli("runs", "list").out.splitlines()
        assert ("size" in heading, "clerk" in row) == (has_size, True)


def test_a_run_is_shown_by_the_beginning_of_its_id_or_by_its_folder(cli, add_run):
    folder = add_run("aaaa2222", [0.5], state="failed", reason="the trainer was killed by SIGKILL")
    add_run("bbbb3333", [0.5])
    shown = cli.ok("runs", "show", "aa")
    assert "the trainer was killed by SIGKILL" in shown.out
    assert "palestra runs resume aaaa2222" in shown.out
    data = cli.json("runs", "show", str(folder))
    assert data["run_id"] == "aaaa2222"
    assert data["results"]["final_metrics"]["reward_mean"] == 0.5
    assert data["results"]["model_path"] is None


def test_a_folder_that_the_index_does_not_list_is_shown_and_compared(cli, add_run, home):
    copied = add_run("aaaa2222", [0.0, 0.5]).rename(home.parent / "from-elsewhere")
    add_run("bbbb3333", [0.25])
    shown = cli.json("runs", "show", str(copied))
    assert (shown["folder"], shown["results"]["final_metrics"]["reward_mean"]) == (str(copied), 0.5)
    assert "from-elsewhere" in cli("runs", "show", "from-elsewhere").out
    data = cli.json("runs", "compare", "from-elsewhere", "bbbb")
    assert [run["reward_last"] for run in data["runs"]] == [0.5, 0.25]
    assert "not in the index" in cli("runs", "watch", str(copied)).err


def test_a_copy_of_a_run_is_told_from_it_by_its_folder(cli, add_run, tmp_path):
    folder = add_run("aaaa2222", [0.0, 0.5])
    shutil.copytree(folder, tmp_path / "copy")
    answer = cli.ok("runs", "compare", "aaaa", "copy", "--plot", "curves.svg")
    assert "copy  " in answer.out
    svg = ET.fromstring((tmp_path / "curves.svg").read_text())
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 4  # a curve each, and a line below it


def test_the_last_lines_of_a_log_are_printed(cli, add_run):
    add_run("aaaa2222", [0.5])
    assert cli("runs", "logs", "aaaa", "-n", "2").out == "two\nthree\n"
    assert cli("runs", "logs", "aaaa", "--follow").out == "one\ntwo\nthree\n"
    assert cli.json("runs", "logs", "aaaa")["lines"] == ["one", "two", "three"]
    assert "has no log of 'env'; it has trainer, supervisor" in cli("runs", "logs", "aaaa", "env").err


def test_watch_ends_with_the_run_and_tells_by_its_status_whether_it_failed(cli, add_run):
    add_run("aaaa2222", [0.5])
    add_run("bbbb3333", [0.5], state="failed", reason="out of memory")
    watched = cli("runs", "watch", "aaaa")
    assert (watched.code, watched.out.split()[:2]) == (0, ["aaaa2222", "completed"])
    failed = cli("runs", "watch", "bbbb", "--json")
    assert failed.code == 1
    assert json.loads(failed.out)["reason"] == "out of memory"


def test_what_has_ended_is_neither_stopped_nor_resumed_and_the_others_are_told_of_too(cli, add_run):
    add_run("aaaa2222", [0.5])
    answer = cli("runs", "stop", "aaaa", "zzzz", "--json")
    assert answer.code == 2
    said = json.loads(answer.out)
    assert said["runs"] == []
    assert len(said["errors"]) == 2
    assert "it is completed" in answer.err
    assert "the run aaaa2222 is complete" in cli("runs", "resume", "aaaa").err


def test_a_stop_says_that_it_waits_for_the_end_of_the_step(cli, add_run, home, monkeypatch):
    add_run("aaaa2222", [0.5], state="running", ended=None, heartbeat=time.time())

    def stop(self, run_id, wait_s, on_wait):
        for waited_s in (1.0, 4.0, 5.0, 8.0):
            on_wait(waited_s)
        return self.get(run_id)

    monkeypatch.setattr("palestra.runs.manager.RunManager.stop", stop)
    told = [line for line in cli("runs", "stop", "aaaa").err.splitlines() if "finishing its step" in line]
    assert [line.split()[0] for line in told] == ["aaaa2222"] * 2
    assert [line.split()[-2] for line in told] == ["4", "8"]


def test_a_run_is_removed_with_its_folder_unless_that_shall_stay(cli, add_run):
    gone, kept = add_run("aaaa2222", [0.5]), add_run("bbbb3333", [0.5])
    assert cli("runs", "rm", "aaaa", "--yes").code == 0
    assert cli("runs", "rm", "bbbb", "--keep-folder").code == 0
    assert (gone.exists(), kept.exists()) == (False, True)
    assert cli.json("runs", "list")["count"] == 0


def test_runs_are_compared_by_settings_that_differ_and_by_curves(cli, add_run, tmp_path):
    add_run("aaaa2222", [0.0, 0.5, 1.0], settings={"lora.r": 8})
    add_run("bbbb3333", [0.0, 0.25])
    answer = cli.ok("runs", "compare", "aaaa", "bbbb", "--plot", "curves.svg")
    rows = {line.split("  ")[0]: line.split()[-2:] for line in answer.out.splitlines() if line}
    assert rows["lora.r"] == ["8", "0"]
    assert rows["steps"] == ["3", "2"]
    assert "train.learning_rate" not in rows
    assert "▁▅█  pass rate" in answer.out
    svg = ET.fromstring((tmp_path / "curves.svg").read_text())
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 4
    data = cli.json("runs", "compare", "aaaa", "bbbb")
    assert [run["reward_last"] for run in data["runs"]] == [1.0, 0.25]
    assert "one run cannot be compared" in cli("runs", "compare", "aaaa").err
    assert "no .svg file" in cli("runs", "compare", "aaaa", "bbbb", "--plot", "x.png").err


def test_a_folder_in_which_somebody_trains_is_not_trained_in_twice(cli, home, add_run, monkeypatch):
    me = this_process()
    folder = add_run("aaaa2222", [], state="running", kind="foreground", pid=me.pid, born=me.born, ended=None)
    (folder / "run.json").write_text(json.dumps({"name": "clerk", "source": "palestra.demo"}))
    answer = cli.error("train", "--resume", str(folder))
    assert "is run aaaa2222, which is running" in answer
    assert "palestra runs stop aaaa2222" in answer


def test_a_training_that_was_killed_in_its_terminal_is_found_dead_and_can_be_removed(cli, home, add_run):
    folder = add_run("aaaa2222", [0.5], state="running", kind="foreground", pid=os.getpid(), born="another", ended=None)
    (run,) = cli.json("runs", "list")["runs"]
    assert run["state"] == "failed"
    assert run["reason"] == "its process has died; continue it with: palestra runs resume aaaa2222"
    assert cli.json("runs", "show", "aaaa")["state"] == "failed"
    assert json.loads((folder / "index.json").read_text())["state"] == "running"  # looking changes nothing
    assert cli("runs", "rm", "aaaa", "--yes").code == 0
    assert cli.json("runs", "list")["count"] == 0


def test_gc_marks_the_runs_that_have_died_and_leaves_the_others_alone(cli, home, add_run):
    me = this_process()
    add_run("aaaa2222", [0.5], state="running", kind="foreground", pid=os.getpid(), born="another", ended=None)
    add_run("bbbb3333", [0.5], state="running", kind="foreground", pid=me.pid, born=me.born, ended=None)
    add_run("cccc4444", [0.5])
    assert cli("runs", "gc").out == "aaaa2222 clerk: failed\n"
    assert [Index(home).row(run_id).state for run_id in ("aaaa2222", "bbbb3333", "cccc4444")] == [
        "failed", "running", "completed",
    ]  # fmt: skip
    assert cli.json("runs", "gc") == {"runs": [], "errors": []}


def test_run_ids_are_completed(add_run):
    add_run("aaaa2222", [0.5])
    add_run("bbbb3333", [0.5])
    complete = ShellComplete(commands, {}, "palestra", "_PALESTRA_COMPLETE")
    assert [item.value for item in complete.get_completions(["runs", "show"], "b")] == ["bbbb3333"]
    assert "runs" in [item.value for item in complete.get_completions([], "ru")]
    assert "runs" in COMMANDS
