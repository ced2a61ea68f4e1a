"""Stages of a run: their plan, their settings, what they learn, and going on in the right one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY, agent, suite
from safetensors.torch import load_file

from palestra import measure, train_grpo, train_sft
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError, UnsupportedError
from palestra.core.run_folder import Resume, RunFolder
from palestra.train.checkpoint import read_checkpoint
from palestra.train.stages import stage_config, stage_names
from palestra.train.tasks import FinishTask

QUICK = {
    "model.threads": 1, "train.problems_per_step": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 24,
    "train.max_steps": 2, "checkpoint.every": 1, "checkpoint.keep_last": 50, "stages.sft_batch": 2,
    "stages.sft_epochs": 1, "stages.rft_rounds": 2, "stages.rft_attempts": 2, "stages.rft_pass": 8,
}  # fmt: skip
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"It is {word}."}]}
    for word in ("red", "blue", "green")
]


@measure
def says_it(ctx: Any) -> bool:
    return bool(ctx.final_assistant_message.text)


@measure
def says_red(ctx: Any) -> bool:
    return bool(ctx.final_assistant_message.text) and ctx.expect in ("red", "blue")


def cases() -> Any:
    return suite(*({"input": f"Say {word}.", "expect": word} for word in "red blue green white".split()))


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CONVERSATIONS))
    return path


def run(folder: Path, plan: str, how: Any = says_it, resume: Any = None, **settings: Any) -> RunFolder:
    config = QUICK | {"stages.plan": plan} | settings
    result = train_grpo(
        agent(tools=()), cases(), [how], config=config, held_out=0.25, progress=False, folder=folder, resume=resume
    )
    return result.run


def require_same_weights(one: RunFolder, other: RunFolder) -> None:
    ours, theirs = (load_file(folder.model / "model.safetensors") for folder in (one, other))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"plan": "sft,other"}, "other"),
        ({"plan": "auto,grpo"}, "auto"),
        ({"plan": ""}, "unknown stage"),
        ({"plan": "rft:x"}, "rft:x"),
        ({"plan": "rft,grpo", "traces": "x.jsonl"}, "sft"),
        ({"plan": "rft,grpo", "teacher": "http://x/v1", "teacher_model": "m"}, "sft"),
    ],
)
def test_an_unknown_stage_and_settings_of_one_that_is_not_there_are_refused(settings, word) -> None:
    with pytest.raises(SettingError, match=word):
        RunConfig.build({"stages": settings})
    if "," in settings["plan"] and word == "sft":
        auto = RunConfig.build({"stages": settings | {"plan": "auto"}})
        assert stage_names(auto, FinishTask(None)) == ["sft", "rft", "grpo"]


def test_the_settings_of_a_stage_come_from_those_of_grpo() -> None:
    config = RunConfig.build(
        {"train.learning_rate": 1e-6, "train.beta": 0.1, "echo.coefficient": 0.5, "train.entropy_coefficient": 0.1}
    )
    sft = stage_config(config, "sft")
    assert (sft.train.loss, sft.train.beta, sft.echo.coefficient) == ("cross_entropy", 0.0, 0.0)
    assert sft.train.learning_rate == pytest.approx(5e-6)
    assert stage_config(config.with_settings({"lora.r": 8}), "sft").train.learning_rate == 2e-6
    assert stage_config(config.with_settings({"stages.sft_learning_rate": 1e-3}), "rft").train.learning_rate == 1e-3
    assert stage_config(config, "distill").distill.only
    assert stage_config(config, "grpo") == config


def test_a_run_goes_from_stage_to_stage_and_says_what_each_did(tmp_path: Path, traces: Path) -> None:
    done = run(tmp_path / "run", "sft,grpo", **{"stages.traces": str(traces)})
    stages = done.record["stages"]
    assert [(s["name"], s["first_step"], s["last_step"]) for s in stages] == [("sft", 0, 2), ("grpo", 2, 4)]
    assert stages[0]["after"] == stages[1]["before"]
    rows = [row for row in done.metrics() if "loss" in row or "reward_mean" in row]
    assert ["demonstrations" in row for row in rows] == [True, True, False, False]
    assert done.record["steps"] == 4
    assert read_checkpoint(done.step_folder(3)).stage == 1
    assert "stages" in json.loads(done.report_file.read_text())
    run(done.path, "sft,grpo", resume=Resume(done.path, checkpoint="1", finish=True))
    assert [row["step"] for row in done.metrics()] == [1], "a run that is finished takes no more stages"
    assert done.report() is not None


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_goes_on_in_its_stage_with_the_same_numbers(tmp_path: Path, traces: Path, step: int) -> None:
    settings = {"stages.traces": str(traces)}
    whole = run(tmp_path / "whole", "sft,grpo", **settings)
    again = run(tmp_path / "again", "sft,grpo", **settings)
    traces.unlink()  # what is learned is in the run folder
    run(again.path, "sft,grpo", resume=Resume(again.path, checkpoint=str(step)), **settings)
    require_same_weights(whole, again)
    assert [r["step"] for r in again.metrics()] == [r["step"] for r in whole.metrics()]


def learned(folder: RunFolder) -> list[list[int]]:
    rows = map(json.loads, folder.demonstrations_file.read_text().splitlines())
    return [[token for turn in row["turns"] for token in turn["token_ids"]] for row in rows]


@pytest.mark.parametrize("step", [1, 4])
def test_an_rft_stage_resumes_with_the_same_demonstrations(tmp_path: Path, step: int) -> None:
    whole, again = (run(tmp_path / name, "rft,grpo", says_red) for name in ("whole", "again"))
    (rft, _) = whole.record["stages"]
    assert rft["last_step"] > 6, "it trains between two rounds"
    assert learned(whole)
    run(again.path, "rft,grpo", says_red, resume=Resume(again.path, checkpoint=str(step)))
    assert learned(again) == learned(whole)
    require_same_weights(whole, again)


def test_conversations_alone_are_learned_without_an_agent(tmp_path: Path, traces: Path) -> None:
    config = QUICK | {"stages.plan": "sft", "stages.traces": str(traces), "model.name": TINY, "stages.sft_epochs": 8}
    done, outcome = train_sft(config, folder=tmp_path / "run")
    assert outcome.before is None
    losses = [row["loss"] for row in done.metrics() if "loss" in row]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2
    assert (done.model / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("config", "word"), [({"stages.plan": "sft"}, "stages.traces"), ({"stages.traces": "x"}, "sft stage")]
)
def test_what_cannot_be_learned_is_refused(config: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingError, match=word):
        train_sft({"model.name": TINY} | config)


def program(case: Any, base_url: str, api_key: str) -> None: ...


def test_stages_without_demonstrations_or_our_agent_loop_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="no demonstrations"):
        run(tmp_path / "run", "sft,grpo")
    options = {"config": QUICK | {"stages.plan": "rft,grpo"}, "progress": False, "folder": tmp_path / "r"}
    with pytest.raises(UnsupportedError, match="rft"):
        train_grpo(program, cases(), [says_it], **options)
