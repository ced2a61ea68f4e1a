"""A real Ray cluster of two nodes on this machine: `make test-ray`. Skipped where Ray is not installed.

All trainings here have one seed, so each must sample and train the very rollouts of the one without Ray: lost actors,
joined ones and a lost head change nothing in them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from served import free_port

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it in an environment of its own")
from ray.cluster_utils import Cluster  # noqa: E402

from palestra.runs.manager import RunManager  # noqa: E402

pytestmark = pytest.mark.timeout(900)
STEPS = 4
SETTINGS = {
    "train.max_steps": STEPS, "train.problems_per_step": 4, "train.filter_equal_groups": "false", "eval.cases": 4,
    "rollout.group_size": 4, "rollout.max_new_tokens": 80, "checkpoint.every": 1, "seed": 3,
}  # fmt: skip
RAY = {"backend": "ray", "ray.timeout_s": 300}  # a busy machine takes its time
# A tool that takes its time, so that something can happen in the middle of a step.
SLOW_AGENT = """
import os, time
from dataclasses import replace
from palestra.demo import agent as demo, held_out, suite

def slowly(fn):
    def slow(**arguments):
        time.sleep(float(os.environ.get("NAP_S", "0")))
        return fn(**arguments)
    return slow

agent = replace(demo, tools=tuple(replace(tool, fn=slowly(tool.fn)) for tool in demo.tools))
"""


class Machines:
    """Two nodes with room for one actor each, and trainings on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PALESTRA_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "NAP_S": "0.3"}
        self.env |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self.started: list[subprocess.Popen[str]] = []

    def cluster(self, **head: Any) -> Cluster:
        os.environ |= {name: self.env[name] for name in ("NAP_S", "OMP_NUM_THREADS", "RAY_USAGE_STATS_ENABLED")}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **head})
        made.add_node(num_cpus=1)
        return made

    def command(self, name: str, *more: str, **settings: Any) -> list[str]:
        options = [word for key, value in (SETTINGS | settings).items() for word in (f"--{key}", str(value))]
        return [sys.executable, "-m", "palestra", "train", *more, *options, "--folder", str(self.folder / name)]

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> str:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == code, output[-3000:]
        return output

    def rollouts(self, name: str) -> dict[int, list[Any]]:
        """By step: whose problem, which tokens, which reward."""
        steps: dict[int, list[Any]] = {}
        for line in (self.folder / name / "rollouts.jsonl").read_text().splitlines():
            row = json.loads(line)
            tokens = [turn["token_ids"] for turn in row["turns"]]
            steps.setdefault(row["step"], []).append((row["problem_id"], tokens, row["reward"]))
        return steps

    def until(self, condition: Callable[[], Any], within_s: float = 180.0) -> Any:
        until = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < until, "it did not happen"
            time.sleep(0.05)
        return found

    def steps_done(self, name: str) -> int:
        metrics = self.folder / name / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        return max((row["step"] for row in rows if "loss" in row or "train_seconds" in row), default=0)


def actor_pids() -> list[int]:
    """The processes of rollout actors on this machine, by the title that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::RolloutActor"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "slow_agent.py").write_text(SLOW_AGENT)
    made = Machines(folder)
    yield made
    for process in made.started:
        process.kill()


@pytest.fixture(scope="module")
def reference(machines: Machines) -> dict[int, list[Any]]:
    """The rollouts of a training in one process, without Ray."""
    machines.finish(machines.start(machines.command("one-process", "slow_agent.py")))
    found = machines.rollouts("one-process")
    assert {step: len(rows) for step, rows in found.items()} == {step: 16 for step in range(1, STEPS + 1)}
    return found


@pytest.fixture
def cluster(machines: Machines) -> Iterator[Cluster]:
    made = machines.cluster()
    yield made
    made.shutdown()


def report(name: str, text: str) -> None:
    print(f"\n[ray] {name}: {text}", flush=True)


def test_an_actor_killed_in_mid_batch_and_one_that_joins_change_no_rollout(
    machines: Machines, reference: dict[int, list[Any]], cluster: Cluster
) -> None:
    settings = {**RAY, "ray.address": cluster.address, "ray.actors": 3}
    began = time.monotonic()
    process = machines.start(machines.command("lost-actor", "slow_agent.py", **settings))
    machines.until(lambda: machines.steps_done("lost-actor") == 1)
    first = machines.until(lambda: len(pids := actor_pids()) == 2 and pids)  # the third finds no room
    time.sleep(0.5)  # in the middle of the second step, whose tools take longer
    os.kill(first[0], signal.SIGKILL)
    cluster.add_node(num_cpus=1)
    machines.until(lambda: len(actor_pids()) == 3)
    output = machines.finish(process)
    assert "a rollout actor was lost" in output
    assert machines.rollouts("lost-actor") == reference
    report("actor killed, node joined", f"{STEPS} steps, all 64 rollouts equal; {time.monotonic() - began:.0f} s")


def test_a_killed_head_fails_the_run_with_its_reason_and_the_run_resumes_on_another_cluster(
    machines: Machines, reference: dict[int, list[Any]], cluster: Cluster
) -> None:
    address = {**RAY, "ray.address": "auto"}
    machines.env["RAY_ADDRESS"] = cluster.address
    process = machines.start(machines.command("lost-head", "slow_agent.py", **address))
    machines.until(lambda: machines.steps_done("lost-head") == 2)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    began = time.monotonic()
    output = machines.finish(process, code=2)
    ended_s = time.monotonic() - began
    assert "the head of the Ray cluster at" in output.replace("\n", " ")
    assert "The last good checkpoint is" in output.replace("\n", " ")
    listed = subprocess.run(
        [sys.executable, "-m", "palestra", "runs", "list", "--json"], env=machines.env, capture_output=True, text=True
    )
    rows = {Path(row["folder"]).name: row for row in json.loads(listed.stdout)["runs"]}
    assert rows["lost-head"]["state"] == "failed"
    assert "the head of the Ray cluster" in rows["lost-head"]["reason"]
    another = machines.cluster()
    try:
        machines.env["RAY_ADDRESS"] = another.address
        resumed = machines.start([sys.executable, "-m", "palestra", "train", "--resume", "lost-head"])
        machines.finish(resumed)
    finally:
        another.shutdown()
        del machines.env["RAY_ADDRESS"]
    assert machines.rollouts("lost-head") == reference
    report("head killed", f"failed with its reason after {ended_s:.0f} s, resumed, all 64 rollouts equal")


def test_a_run_in_the_background_stops_and_resumes_and_has_logs(
    machines: Machines, reference: dict[int, list[Any]], cluster: Cluster
) -> None:
    def palestra(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "palestra", *words], env=machines.env, capture_output=True, text=True,
            cwd=machines.folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    settings = {**RAY, "ray.address": cluster.address}
    command = machines.command("none", "slow_agent.py", **settings)[3:-2]
    started = json.loads(palestra(*command, "--detach", "--json"))
    run_id, folder = started["run_id"], Path(started["folder"])
    name = str(folder.relative_to(machines.folder))

    # asking by commands would keep Ray's workers, of niceness 15, waiting
    manager = RunManager(machines.folder / "home")
    machines.until(lambda: machines.steps_done(name) >= 1)
    palestra("runs", "stop", run_id)
    assert manager.get(run_id).state == "stopped"
    machines.until(lambda: not actor_pids(), within_s=30)
    palestra("runs", "resume", run_id)
    machines.until(lambda: manager.get(run_id).state in ("completed", "failed"), within_s=300)
    assert manager.get(run_id).state == "completed", manager.get(run_id).reason
    assert run_id in palestra("runs", "list")
    assert palestra("runs", "logs", run_id)
    assert machines.rollouts(name) == reference
    report("background", "stopped, resumed and completed, all 64 rollouts equal")


def test_ray_client_gives_the_same_rollouts(machines: Machines, reference: dict[int, list[Any]]) -> None:
    port = free_port()
    cluster = machines.cluster(ray_client_server_port=port)
    try:
        settings = {**RAY, "ray.address": f"ray://127.0.0.1:{port}", "train.max_steps": 2}
        machines.finish(machines.start(machines.command("client", "slow_agent.py", **settings)))
    finally:
        cluster.shutdown()
    assert machines.rollouts("client") == {step: reference[step] for step in (1, 2)}
    report("ray://", "2 steps, all 32 rollouts equal")


def test_the_demo_is_learned_on_two_nodes(machines: Machines, cluster: Cluster) -> None:
    began = time.monotonic()
    machines.env["NAP_S"] = "0"
    command = [sys.executable, "-m", "palestra", "train", "--folder", str(machines.folder / "demo"), "--json"]
    options = ["--backend", "ray", "--ray.address", cluster.address, "--train.max_steps", "20"]
    process = subprocess.run(
        [*command, *options], env=machines.env, capture_output=True, text=True, cwd=machines.folder
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads((machines.folder / "demo" / "report.json").read_text())
    before, after = result["before"]["pass_rate"], result["after"]["pass_rate"]
    report("the demo", f"held-out pass rate {before} -> {after}, {time.monotonic() - began:.0f} s")
    assert after["low"] > before["high"], (before, after)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_that_does_not_answer_is_told_with_its_remedy(machines: Machines, address: str) -> None:
    began = time.monotonic()
    command = machines.command("nowhere", **{**RAY, "ray.address": address})
    output = machines.finish(machines.start(command), code=2)
    assert not (machines.folder / "nowhere").exists()
    assert f"no Ray cluster answers at {address}" in output
    assert "ray start --head" in output
    report(f"no answer at {address}", f"told after {time.monotonic() - began:.0f} s, no run folder left behind")


def test_something_else_that_listens_there_is_given_up_within_the_time_out(machines: Machines) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        settings = {**RAY, "ray.address": address, "ray.timeout_s": 5}
        began = time.monotonic()
        output = machines.finish(machines.start(machines.command("deaf", **settings)), code=2)
    assert "within 5 s (ray.timeout_s)" in output
    assert time.monotonic() - began < 60
