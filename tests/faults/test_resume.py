"""A run that is killed anywhere goes on with the same numbers as if nothing had happened."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forkserver import Forkserver
from safetensors.torch import load_file

from palestra import demo, train_grpo
from palestra.cli.main import run as palestra
from palestra.core.errors import StateError
from palestra.core.run_folder import RunFolder, step_of
from palestra.runs.index import Index, palestra_home
from palestra.runs.processes import identify

STEPS = 6
ARGUMENTS = [
    "--train.max_steps", str(STEPS), "--checkpoint.every", "1", "--train.problems_per_step", "2",
    "--rollout.group_size", "4", "--eval.cases", "4", "--seed", "5",
]  # fmt: skip
# What depends on the clock or on the process, not on the run.
TIMED = ("seconds", "per_second", "per_s", "memory")


def train(folder: Path, *arguments: str) -> int:
    """`palestra train` in this process, in a folder of its own; its exit status."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return palestra(["train", *arguments])


def spawn(forkserver: Forkserver, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Python in a folder of its own, with as many threads as here: sums are then added up in the same order."""
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return forkserver.popen(*arguments, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run_of(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMED)} for row in rows]


def kill_in_the_middle(process: subprocess.Popen[bytes], folder: Path, rng: random.Random) -> None:
    """Wait for some finished steps, then a random moment more, then SIGKILL."""
    after = rng.randint(1, STEPS - 3)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        found = list(folder.glob("runs/*/metrics.jsonl"))
        if found and len(found[0].read_text().splitlines()) >= after:
            break
        time.sleep(0.02)
    time.sleep(rng.random() * 0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "adapter", [pytest.param([], id="full"), pytest.param(["--lora.r", "4"], id="lora", marks=pytest.mark.slow)]
)
def test_a_killed_and_resumed_run_equals_one_that_went_straight_through(forkserver, tmp_path, adapter) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    victim = spawn(forkserver, broken, "-m", "palestra", "train", *ARGUMENTS, *adapter)
    kill_in_the_middle(victim, broken, random.Random(os.getpid()))
    assert len(metrics(run_of(broken))) < STEPS
    assert train(broken, "--resume", str(run_of(broken))) == 0
    assert train(straight, *ARGUMENTS, *adapter) == 0

    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert_same_run(run_of(broken), run_of(straight), name)


SCRIPT = """
from palestra import demo, train_grpo
train_grpo(demo.agent, demo.suite, config=demo.config | {settings}, held_out=demo.held_out)
"""


@pytest.mark.slow
def test_a_run_that_was_started_from_python_resumes_there(forkserver: Forkserver, tmp_path: Path) -> None:
    settings = {
        "seed": 5, "train.max_steps": STEPS, "train.problems_per_step": 2, "rollout.group_size": 4,
        "eval.cases": 4, "eval.every": 3, "checkpoint.every": 1,
    }  # fmt: skip
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    victim = spawn(forkserver, broken, "-c", SCRIPT.format(settings=settings))
    kill_in_the_middle(victim, broken, random.Random(os.getpid()))
    run = run_of(broken)
    assert len(metrics(run)) < STEPS + 2  # an evaluation has a row of its own
    options = {"config": demo.config | settings, "held_out": demo.held_out}
    resumed = train_grpo(demo.agent, demo.suite, held_out=demo.held_out, resume=run)
    expected = train_grpo(demo.agent, demo.suite, **options, folder=straight)
    assert resumed.run.path == run
    assert_same_run(run, straight, "model.safetensors")
    assert resumed.before.pass_rate == expected.before.pass_rate
    assert resumed.after.pass_rate == expected.after.pass_rate
    assert resumed.run.eval_names() == expected.run.eval_names() == ["before", 3, "after"]
    assert run.joinpath("report.html").is_file()
    [row] = [row for row in Index(palestra_home()).rows() if row.folder == str(run.resolve())]
    assert row.state == "completed"  # the row of the life that was killed goes on


def test_a_run_in_which_another_process_trains_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    config = demo.config | {"train.max_steps": 2, "train.problems_per_step": 2, "eval.cases": 2, "checkpoint.every": 1}
    run = train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out, folder=tmp_path / "run").run
    index, other = Index(palestra_home()), subprocess.Popen(["sleep", "60"])
    [row] = [row for row in index.rows() if row.folder == str(run.path.resolve())]
    process = identify(other.pid)
    assert process is not None
    try:
        index.move(row.run_id, ["completed"], "running", pid=process.pid, born=process.born)
        with run.metrics_file.open("a") as file:  # the other one is a step ahead of its last checkpoint
            file.write('{"step": 3}\n')
        before = run.metrics_file.read_text()
        with pytest.raises(StateError, match=f"is run {row.run_id}, which is running"):
            train_grpo(demo.agent, demo.suite, held_out=demo.held_out, resume=run.path)
        assert run.metrics_file.read_text() == before
    finally:
        other.kill()
        other.wait()


def test_a_finished_run_can_be_made_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight, longer = tmp_path / "straight", tmp_path / "longer"
    constant = ["--train.scheduler", "constant"]  # others end where the run was to end
    assert train(straight, *ARGUMENTS, *constant, "--train.max_steps", "4") == 0
    assert train(longer, *ARGUMENTS, *constant, "--train.max_steps", "2") == 0
    run = run_of(longer)
    capsys.readouterr()
    assert train(longer, "--resume", str(run), "--train.max_steps", "1") != 0
    assert "has 2 steps already" in capsys.readouterr().err
    assert train(longer, "--resume", str(run), "--train.max_steps", "4") == 0
    assert_same_run(run, run_of(straight), "model.safetensors")
    assert "max_steps: 4" in (run / "config.yaml").read_text()


PROGRAM = """
import json, os, sys, urllib.request
case = json.load(sys.stdin)
body = {"model": "any", "messages": [{"role": "user", "content": case["input"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(json.load(opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)))["choices"][0]["message"])
"""
MEASURE = """
def even(ctx):
    return len(ctx.final_assistant_message.text) % 2 == 0
"""


def program_options(folder: Path) -> list[str]:
    """The options of a run whose agent is a program; its files are in `folder`."""
    (folder / "agent.py").write_text(PROGRAM)
    (folder / "score.py").write_text(MEASURE)
    cases = [{"input": f"What do {i} red lamps cost?"} for i in range(6)]
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    command = shlex.join([sys.executable, "-IS", str(folder / "agent.py")])
    options = ["--agent-cmd", command, "--cases", str(folder / "cases.jsonl"), "--model.name", "palestra/tiny"]
    short = "--rollout.max_new_tokens 8 --rollout.temperature 1 --rollout.group_size 3 --train.problems_per_step 1"
    return [*ARGUMENTS, *options, "--measure", f"{folder / 'score.py'}:even", *short.split(), "--eval.cases", "1"]


def rollouts(run: Path) -> dict[int, list[Any]]:
    """The sampled tokens and rewards of each step, in the order of the file."""
    found: dict[int, list[Any]] = {}
    for row in RunFolder(run).rollouts():
        tokens = [turn["token_ids"] for turn in row["turns"]]
        found.setdefault(row["step"], []).append((row["problem_id"], row["reward"], tokens))
    return found


def test_a_killed_run_of_an_agents_program_equals_one_that_went_straight_through(forkserver, tmp_path) -> None:
    straight, broken, options = tmp_path / "straight", tmp_path / "broken", program_options(tmp_path)
    victim = spawn(forkserver, broken, "-m", "palestra", "train", *options)
    kill_in_the_middle(victim, broken, random.Random(os.getpid()))
    assert train(broken, "--resume", str(run_of(broken))) == 0
    assert train(straight, *options) == 0
    assert rollouts(run_of(broken)) == rollouts(run_of(straight))
    assert any("loss" in row for row in metrics(run_of(straight))), "nothing was learned, so weights say nothing"
    assert_same_run(run_of(broken), run_of(straight), "model.safetensors")


def test_a_killed_run_that_samples_ahead_keeps_its_steps_and_takes_each_once(forkserver, tmp_path) -> None:
    """Which weights sampled which token depends on timing, so nothing more is promised (docs/runs.md)."""
    broken, ahead = tmp_path / "broken", ["--rollout.max_staleness", "2"]
    victim = spawn(forkserver, broken, "-m", "palestra", "train", *ARGUMENTS, *ahead)
    kill_in_the_middle(victim, broken, random.Random(os.getpid()))
    run = run_of(broken)
    checkpoint = RunFolder(run).last_checkpoint()
    kept = 0 if checkpoint is None else step_of(checkpoint)
    before, rows = rollouts(run), metrics(run)
    assert train(broken, "--resume", str(run)) == 0
    after = rollouts(run)
    assert {step: after[step] for step in range(1, kept + 1)} == {step: before[step] for step in range(1, kept + 1)}
    assert [row for row in metrics(run) if row["step"] <= kept] == [row for row in rows if row["step"] <= kept]
    assert [row["step"] for row in metrics(run)] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= 2 for row in metrics(run) if "staleness_max" in row)
    assert {step: len(found) for step, found in after.items()} == {step: 8 for step in range(1, STEPS + 1)}


def assert_same_run(one: Path, other: Path, weights: str) -> None:
    for row, expected in zip(metrics(one), metrics(other), strict=True):
        # Who shares a batch with whom depends on how fast tools answer, and the sampler's last bits on that.
        # The learner computes its own, so these diagnostics are all that can tell.
        for name in ("kl_sampler", "sampler_gap_mean", "sampler_gap_max"):
            assert row.pop(name, 0.0) == pytest.approx(expected.pop(name, 0.0), rel=0.02, abs=1e-4)
        assert row == expected
    mine, theirs = (load_file(run / "model" / weights) for run in (one, other))
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        assert value.equal(theirs[key]), key
