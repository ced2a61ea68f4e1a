"""Runs in the background outlive who started them, end without leaving anything behind, and say why.

The trainer is the real command with an agent file that, instead of training, does what the test is about.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import wait_until

from palestra.core.errors import NotAllowedError, NotFoundError, PalestraError, SettingError, StateError
from palestra.core.extras import provided
from palestra.runs.index import Index
from palestra.runs.manager import Run, RunManager, RunRequest
from palestra.runs.processes import Process, descendants, end_all, processes_of_run

PALESTRA = [sys.executable, "-m", "palestra"]
BEGIN = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1]).parent  # python -m palestra.run FOLDER/request.json trainer


def begin():
    (folder / "run.json").write_text(json.dumps({"name": "fake", "source": __file__}))
    (folder / "config.yaml").write_text("{}")
"""
SLEEP = "begin()\ntime.sleep(300)"
# what a sandbox leaves behind when its trainer is killed: a session of its own, and nothing in its environment
LEAVE_A_CHILD = "begin()\nsubprocess.Popen(['sleep', '299'], start_new_session=True, env={})\ntime.sleep(300)"


class Runs:
    """A home with runs that play."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.manager, self.index = RunManager(self.home, max_runs=9), Index(self.home)

    def agent_file(self, code: str) -> str:
        path = self.folder / f"agent_{len(list(self.folder.glob('agent_*.py')))}.py"
        path.write_text(BEGIN + textwrap.dedent(code))
        return str(path)

    def start(self, code: str, **more: Any) -> str:
        return self.manager.start(RunRequest(agent_file=self.agent_file(code), **more)).run_id

    def slow_environment(self) -> RunRequest:
        """A run on the wire whose environment never gets ready."""
        path = self.folder / "slow_env.py"
        path.write_text("from palestra import Env\nimport time\ntime.sleep(300)\nclass Slow(Env):\n    '''Slow.'''\n")
        return RunRequest(environment=str(path), settings={"train.max_steps": 2}, wire=True)

    def wait(self, run_id: str, *states: str, within_s: float = 30.0) -> Run:
        wait_until(lambda: self.manager.get(run_id).state in states, within_s, every_s=0.05)
        return self.manager.get(run_id)

    def process(self, run_id: str, part: str) -> Process:
        return self.index.row(run_id).parts[part].process

    def all_processes(self, run_id: str) -> list[Process]:
        supervisor = self.index.row(run_id).supervisor
        return [] if supervisor is None or not supervisor.is_alive else [supervisor, *descendants(supervisor.pid)]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    for row in made.index.rows():
        end_all([*made.all_processes(row.run_id), *processes_of_run(row.run_id)], 0.1)


def test_a_run_outlives_the_shell_that_started_it_and_a_new_process_lists_it(runs):
    env = {**os.environ, "PALESTRA_HOME": str(runs.home)}
    words = f"{' '.join(PALESTRA)} train {runs.agent_file('from palestra.demo import agent, suite')} --detach --json"
    # the file cannot be both a good one and one that sleeps: it is replaced once it has been checked
    shell = subprocess.run(["bash", "-c", words], cwd=runs.folder, env=env, capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    run_id = json.loads(shell.stdout)["run_id"]
    (runs.folder / "agent_0.py").write_text(BEGIN + SLEEP)
    run = runs.wait(run_id, "running")
    assert run.folder.parent == runs.folder / "runs"
    listed = subprocess.run([*PALESTRA, "runs", "list", "--json"], env=env, capture_output=True, text=True)
    (row,) = json.loads(listed.stdout)["runs"]
    assert (row["run_id"], row["state"], row["processes"]) == (run_id, "running", {"trainer": "running"})


def test_a_run_that_ends_well_is_completed_leaves_no_process_and_goes_on_only_with_more_steps(runs):
    run_id = runs.start("if not (folder / 'run.json').exists():\n    begin()\nsys.exit(0)")
    run = runs.wait(run_id, "completed")
    assert run.processes == {"trainer": "exited (0)"}
    assert run.ended is not None
    wait_until(lambda: not runs.all_processes(run_id))
    with pytest.raises(StateError, match="more steps"):
        runs.manager.resume(run_id)
    runs.manager.resume(run_id, max_steps=5)
    assert "max_steps: 5" in (runs.wait(run_id, "completed").folder / "config.yaml").read_text()


def test_a_failure_is_told_with_the_lines_of_the_log_that_explain_it(runs):
    run_id = runs.start(
        "from palestra.core.errors import PalestraError\nraise PalestraError('no such thing; use another')"
    )
    run = runs.wait(run_id, "failed")
    assert run.processes == {"trainer": "exited (2)"}
    assert "the trainer ended with exit code 2" in str(run.reason)
    assert "no such thing; use another" in str(run.reason)
    assert any("no such thing" in line for line in runs.manager.logs(run_id))


def test_a_stopped_trainer_may_save_what_it_has_and_goes_on_when_resumed(runs):
    code = """
        def save(number, frame):
            (folder / "saved").write_text("yes")
            sys.exit(130)

        signal.signal(signal.SIGTERM, save)
        if (folder / "saved").exists():
            sys.exit(0)
        begin()
        time.sleep(300)
    """
    run_id = runs.start(code)
    runs.wait(run_id, "running")
    with pytest.raises(StateError, match="only a stopped or failed run can be resumed"):
        runs.manager.resume(run_id)
    with pytest.raises(StateError, match="stop it first"):
        runs.manager.remove(run_id)
    stopped = runs.manager.stop(run_id)
    assert (stopped.state, stopped.processes) == ("stopped", {"trainer": "exited (130)"})
    with pytest.raises(StateError, match="has ended already"):
        runs.manager.stop(run_id)
    runs.manager.resume(run_id)
    assert runs.wait(run_id, "completed").reason is None
    folder = runs.manager.get(run_id).folder
    runs.manager.remove(run_id)
    assert not folder.exists()
    with pytest.raises(NotFoundError, match="there is no run"):
        runs.manager.get(run_id)


def test_stop_during_start_up_starts_nothing_afterwards(runs):
    provided("runs over the wire")  # its three processes
    request = runs.slow_environment()
    run_id = runs.manager.start(request).run_id
    wait_until(lambda: len(runs.index.row(run_id).parts) == 2, within_s=30)  # API and trainer; no environment yet
    stopped = runs.manager.stop(run_id)
    assert stopped.state == "stopped"
    assert stopped.processes["env"] == "not started"
    time.sleep(1.0)
    assert set(runs.index.row(run_id).parts) == {"api", "trainer"}
    assert not processes_of_run(run_id)


def test_gpus_are_given_to_runs_and_free_again_when_a_supervisor_is_killed(runs, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PALESTRA_GPUS", "0,1,2")
    with pytest.raises(SettingError, match=r"model\.gpus = 4: there are 3 GPUs here; ask for at most 3"):
        runs.start(SLEEP, settings={"model.gpus": 4})
    tell = "(folder / 'gpus').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n" + SLEEP
    first = runs.start(tell, settings={"model.gpus": 2})
    runs.wait(first, "running")
    second = runs.start(tell, settings={"model.gpus": 2})
    wait_until(lambda: runs.manager.get(second).reason == "2 of 3 GPUs are in use")
    os.kill(runs.index.row(first).supervisor.pid, signal.SIGKILL)
    runs.wait(second, "running")
    assert runs.manager.get(first).state == "failed"
    assert [(runs.manager.get(run).folder / "gpus").read_text() for run in (first, second)] == ["0,1", "0,1"]


def test_a_run_stopped_while_it_waits_never_starts(runs):
    runs.manager.max_runs = 1
    first, second, third = (runs.start(SLEEP) for _ in range(3))
    runs.wait(first, "running")
    wait_until(lambda: runs.manager.get(second).reason == "1 of at most 1 runs are running")
    assert runs.manager.stop(second).state == "stopped"
    assert runs.manager.get(second).processes == {"trainer": "not started"}
    runs.manager.stop(first)
    runs.wait(third, "running")
    assert runs.manager.get(second).state == "stopped"


@pytest.mark.slow
def test_five_runs_at_once_have_ports_of_their_own(runs):
    request = runs.slow_environment()
    ids = [runs.manager.start(request).run_id for _ in range(5)]
    for run_id in ids:
        wait_until(lambda run_id=run_id: len(runs.index.row(run_id).parts) == 2, within_s=60)  # its API is ready
    ports = [port for run_id in ids for port in runs.manager.get(run_id).ports.values()]
    assert len(set(ports)) == 10
    for run_id in ids:
        with pytest.raises(urllib.error.HTTPError, match="401"):  # it answers, and none but its own run's processes
            urllib.request.urlopen(f"http://127.0.0.1:{runs.manager.get(run_id).ports['api']}/")
    for run_id in ids:
        os.kill(runs.process(run_id, "trainer").pid, signal.SIGKILL)
        assert "SIGKILL" in str(runs.wait(run_id, "failed").reason)
        assert not processes_of_run(run_id)


STARTER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from palestra.runs.manager import RunManager, RunRequest
manager = RunManager(Path(sys.argv[1]), max_runs=1)
request = RunRequest(agent_file=sys.argv[2], name="same")
with ThreadPoolExecutor(3) as pool:
    for run in pool.map(lambda _: manager.start(request), range(3)):
        print(run.run_id, run.folder)
"""


def test_three_starts_at_once_from_each_of_two_processes_do_not_clash(runs):
    words = [sys.executable, "-c", STARTER, str(runs.home), runs.agent_file("begin()\nsys.exit(0)")]
    starters = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    lines = [line.split() for starter in starters for line in starter.communicate(timeout=60)[0].splitlines()]
    assert all(starter.returncode == 0 for starter in starters)
    assert len({run_id for run_id, _ in lines}) == len({folder for _, folder in lines}) == 6
    assert {run.run_id for run in runs.manager.list()} == {run_id for run_id, _ in lines}
    for run_id, _ in lines:
        with contextlib.suppress(PalestraError):  # one that has ended already
            runs.manager.stop(run_id)
        runs.wait(run_id, "completed", "stopped")


@pytest.mark.parametrize(
    ("victim", "reason"), [("trainer", "the trainer was killed by SIGKILL"), ("supervisor", "its supervisor has died")]
)
def test_whoever_is_killed_nothing_is_left_behind_and_the_index_says_why(runs, victim, reason):
    run_id = runs.start(LEAVE_A_CHILD)
    runs.wait(run_id, "running")
    wait_until(lambda: len(runs.all_processes(run_id)) == 3)  # supervisor, trainer, its child
    time.sleep(1.2)  # the supervisor looks for new processes every second
    everything = runs.all_processes(run_id)
    killed = runs.process(run_id, "trainer") if victim == "trainer" else runs.index.row(run_id).supervisor
    os.kill(killed.pid, signal.SIGKILL)
    # nobody looks: only the system and the index are asked
    wait_until(lambda: not any(process.is_alive for process in everything))
    wait_until(lambda: runs.index.row(run_id).state == "failed")
    assert reason in str(runs.index.row(run_id).reason)


def test_a_run_whose_processes_are_all_killed_is_found_dead_and_does_not_hold_up_the_queue(runs):
    runs.manager.max_runs = 1
    run_id, next_id = runs.start(SLEEP), runs.start(SLEEP)
    runs.wait(run_id, "running")
    supervisor, trainer = runs.index.row(run_id).supervisor, runs.process(run_id, "trainer")
    for process in (supervisor, trainer):
        os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not supervisor.is_alive and not trainer.is_alive)
    run = runs.manager.get(run_id)
    assert run.state == "failed"
    assert "supervisor has died" in str(run.reason)
    assert run_id in str(run.reason)  # how to resume
    wait_until(lambda: runs.index.row(next_id).state in ("starting", "running"), within_s=20)
    assert (runs.index.row(run_id).state, runs.index.row(run_id).reason) == ("failed", run.reason)
    assert [run.run_id for run in runs.manager.gc()] == [run_id]
    assert runs.manager.gc() == []


def test_secrets_reach_the_trainer_and_neither_files_nor_command_lines(runs, monkeypatch):
    secret = "sk-0123456789-secret"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    code = "begin()\nprint('it is', os.environ['WANDB_API_KEY'], flush=True)\ntime.sleep(300)"
    run_id = runs.start(code)
    run = runs.wait(run_id, "running")
    log = run.logs["trainer"]
    wait_until(lambda: "it is [WANDB_API_KEY]" in log.read_text())  # while it goes on
    assert (log.stat().st_mode & 0o777, log.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    for process in runs.all_processes(run_id):
        assert secret not in Path(f"/proc/{process.pid}/cmdline").read_text()
    os.kill(runs.index.row(run_id).supervisor.pid, signal.SIGKILL)
    runs.wait(run_id, "failed")
    written = [path for path in (*runs.home.rglob("*"), *run.folder.rglob("*")) if path.is_file()]
    assert not [path for path in written if secret.encode() in path.read_bytes()]
    with pytest.raises(NotAllowedError, match="holds a secret"):
        runs.start(SLEEP, settings={"track.run_name": secret})


def test_a_stop_after_the_first_step_saves_what_is_done_and_the_run_can_be_resumed(runs):
    code = "from palestra.demo import agent, config, held_out, suite"
    shape = {"train.problems_per_step": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 40, "eval.cases": 2}
    run_id = runs.start(code, settings={**shape, "train.max_steps": 12, "checkpoint.every": 0})
    wait_until(lambda: runs.manager.get(run_id).progress.get("step"), within_s=120)

    stopped = runs.manager.stop(run_id)
    assert (stopped.state, stopped.processes) == ("stopped", {"trainer": "exited (130)"})
    done = int(stopped.progress["step"])
    assert done < 12
    assert str(runs.manager.results(run_id)["checkpoint"]).endswith(f"step-{done:06d}")
    runs.manager.resume(run_id)
    runs.wait(run_id, "completed", within_s=120)
    results = runs.manager.results(run_id)
    assert results["report"]["after"]["pass_rate"]["n"] == 2
    assert Path(results["model_path"], "config.json").is_file()
    assert [row["step"] for row in runs.manager.metrics(run_id)] == list(range(1, 13))


@pytest.mark.parametrize("lost", ["the list", "the record", "both"])
def test_a_run_goes_on_and_is_listed_again_when_the_index_is_lost(runs, lost):
    run_id = runs.start("begin()\nwhile not (folder / 'go').exists():\n    time.sleep(0.05)\nsys.exit(0)")
    folder = runs.wait(run_id, "running").folder
    before = runs.index.row(run_id)
    if lost != "the record":
        runs.index.path.write_bytes(b"\xff" * 1000)
    if lost != "the list":
        (folder / "index.json").write_text("{")
    manager = RunManager(runs.home)
    wait_until(lambda: [(run.run_id, run.state) for run in manager.list()] == [(run_id, "running")])
    assert runs.index.row(run_id) == before
    (folder / "go").touch()
    assert runs.wait(run_id, "completed").reason is None
    wait_until(lambda: not runs.all_processes(run_id))
