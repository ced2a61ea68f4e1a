"""`palestra train` and `palestra eval`, for real, with the embedded model and very few steps."""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import click
import pytest
from rich.console import Console

from palestra.cli.train import training_display
from palestra.core.config import RunConfig
from palestra.core.files import read_jsonl
from palestra.core.run_folder import RunFolder

# A background job of a script ignores SIGINT, and so do its children unless they take it back.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from palestra.cli.main import main; main()"
)


def test_a_training_leaves_a_whole_run_that_is_shown_listed_and_scored(cli, agent_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    path = str(agent_file())
    answer = cli.ok("train", path, "--json", "--seed", "3")
    assert len(answer.out.splitlines()) == 1
    summary = json.loads(answer.out)
    assert 0 <= summary["held_out_before"] <= 1
    assert summary["seconds"] > 0
    folder = RunFolder.open(Path(summary["run_dir"]))
    for name in ("run.json", "config.yaml", "metrics.jsonl", "rollouts.jsonl", "report.json", "report.html", "model"):
        assert (folder.path / name).exists(), name
    report = json.loads(folder.report_file.read_text())
    assert folder.eval_names() == ["before", "after"]
    assert len(list(read_jsonl(folder.eval_file("after")))) == report["after"]["pass_rate"]["n"]
    assert (report["seed"], len(report["metrics"])) == (3, 1)
    assert report["after"]["pass_rate"]["rate"] == summary["held_out_after"]

    for words in ("run folder runs/clerk-", "step 1/1", "Held-out cases", "right_price", "user: What does a"):
        assert words in answer.err
    assert "report.html" in answer.err
    assert "palestra eval my_agent.py --model.name runs/clerk-" in answer.err

    (run,) = cli.json("runs", "list")["runs"]
    assert (run["name"], run["environment"], run["state"]) == ("clerk", "my_agent", "completed")
    assert (Path(run["folder"]), run["progress"]["step"]) == (folder.path.resolve(), 1)
    assert cli("runs", "watch", run["run_id"][:4]).code == 0

    answer = cli.ok("eval", path, "--model.name", f"{folder.path}/model", "--json", "--split", "all")
    assert "all 5 cases of the suite" in answer.err
    scores = json.loads(answer.out.splitlines()[-1])
    assert (scores["split"], scores["cases"]) == ("all", 5)
    assert 0 <= scores["interval"][0] <= scores["pass_rate"] <= scores["interval"][1] <= 1
    assert scores["measures"]["right_price"] == scores["pass_rate"]


def test_a_dry_run_says_what_it_would_need_and_leaves_nothing(cli, agent_file):
    answer = cli("train", str(agent_file()), "--dry-run")
    assert answer.code == 0, answer.err
    for words in ("palestra/tiny: ", "all trained, float32 on cpu", "1 steps of 2 × 2 rollouts", "nothing was trained"):
        assert words in answer.out
    assert "scoring" not in answer.out
    assert not Path("runs").exists()


def test_measure_that_raises_in_every_rollout_stops_the_run_after_the_first_evaluation(cli, agent_file):
    path = agent_file(("    return str(ctx.expect)", "    raise ValueError('the scales are broken')\n    return str"))
    first = "the first error was measure right_price raised ValueError: the scales are broken"
    assert f"scoring before: every rollout failed; {first}" in " ".join(
        cli.error("train", str(path), "--train.max_steps", "2").split()
    )


@pytest.mark.parametrize("is_saved", [True, False])
def test_ctrl_c_offers_to_end_the_run_there_only_where_a_checkpoint_is(tmp_path, capsys, is_saved):
    if is_saved:
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")

    def stop() -> None:
        with training_display(Console(), RunConfig()) as display:
            display.run_dir = tmp_path
            raise KeyboardInterrupt

    with pytest.raises(click.exceptions.Exit):
        stop()
    err = capsys.readouterr().err
    assert f"palestra train --resume {tmp_path}" in err
    assert ("palestra runs finish" in err) is is_saved


def test_ctrl_c_saves_a_checkpoint_and_prints_the_command_that_resumes(cli, agent_file, tmp_path, forkserver):
    slow = ("    return str(ctx.expect)", "    __import__('time').sleep(0.1)\n    return str(ctx.expect)")
    first = forkserver.popen(
        "-c", INTERRUPTIBLE, "train", str(agent_file(slow)), "--train.max_steps", "5", "--eval.cases", "1",
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert first.stdout is not None
    next(line for line in first.stdout if line.startswith("step 2/5"))
    first.send_signal(signal.SIGINT)  # once: a second one would not wait for anything
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert "Traceback" not in err
    command = shlex.split(next(line for line in err.splitlines() if "--resume" in line))
    assert command[:3] == ["palestra", "train", "--resume"]

    second = cli.ok(*command[1:], "--json")
    run = Path(json.loads(second.out.splitlines()[-1])["run_dir"])
    assert run.name == Path(command[3]).name
    assert "going on from step" in second.err
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
