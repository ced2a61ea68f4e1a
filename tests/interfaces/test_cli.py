"""The command line without training: help, options, files, errors."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from palestra.core.config import RunConfig
from palestra.core.errors import NotFoundError


def test_help_names_every_command_and_teaches_by_example(cli):
    answer = cli.ok("--help")
    for command in ("train", "eval", "config", "doctor"):
        assert f"\n  {command} " in answer.out
    answer = cli.ok("train", "--help")
    assert "palestra train my_agent.py --train.learning_rate 2e-5" in answer.out.replace("\n    ", "")
    assert "config --keys" in " ".join(answer.out.split())
    assert "--seed" in answer.out


def test_version_is_the_packages(cli):
    assert cli("--version").out.strip() == f"palestra {version('palestra')}"


@pytest.mark.parametrize(
    ("command", "replacement"),
    [("locks", "palestra config --locked"), ("completion", "_PALESTRA_COMPLETE"), ("version", "palestra doctor")],
)
def test_a_removed_command_names_its_replacement(cli, command, replacement):
    error = cli.error(command, "--json")
    assert replacement in error
    assert len(error.splitlines()) == 1


def test_the_completion_of_the_docs_is_clicks_own():
    command = [sys.executable, "-c", "from palestra.cli.main import main; main()"]
    variables = os.environ | {"_PALESTRA_COMPLETE": "bash_source"}
    script = subprocess.run(command, env=variables, capture_output=True, text=True).stdout
    assert "_PALESTRA_COMPLETE=bash_complete" in script
    assert "complete -o nosort" in script


def test_every_setting_is_listed_with_its_default_for_people_and_for_programs(cli):
    listing = cli("config", "--keys").out
    for key in list(RunConfig.keys()):
        assert f"  {key} = " in listing
    assert "train.learning_rate = none" in listing
    assert "dr_grpo" in listing
    keys = cli.json("config", "--keys")
    assert keys["train.epsilon"]["default"] == RunConfig().train.epsilon
    assert keys.keys() == RunConfig.keys().keys()
    assert not any("\n" in row["about"] for row in keys.values())


def test_printed_config_reads_back_as_itself(cli):
    first = cli("config", "--lora.r", "8").out
    Path("run.yaml").write_text(first)
    assert cli("config", "--config", "run.yaml").out == first
    assert cli.json("config", "--lora.r", "8")["lora"]["r"] == 8


def test_command_line_wins_over_yaml_and_yaml_over_the_agent_file(cli, agent_file):
    path = agent_file(more='config |= {"train.learning_rate": 1e-3, "lora": {"r": 1}, "seed": 1}')
    Path("run.yaml").write_text("lora: {r: 2}\nseed: 2\n")
    config = yaml.safe_load(cli("config", str(path), "--config", "run.yaml", "--seed", "3").out)
    assert (config["train"]["learning_rate"], config["lora"]["r"], config["seed"]) == (1e-3, 2, 3)
    assert config["train"]["epsilon"] == RunConfig().train.epsilon


def test_an_agent_file_may_have_the_flat_config_and_the_command_line_another_model(cli, agent_file):
    more = "from palestra import GRPOTrainingConfig\nconfig = GRPOTrainingConfig(num_generations=6)"
    path = str(agent_file(more=more))
    own = yaml.safe_load(cli("config", path).out)
    assert (own["rollout"]["group_size"], own["model"]["name"]) == (6, "palestra/tiny")
    assert yaml.safe_load(cli("config", path, "--model.name", "other/one").out)["model"]["name"] == "other/one"


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("train.max_steps", "none", None),
        ("train.max_steps", "12", 12),
        ("train.learning_rate", "2e-5", 2e-5),
        ("train.importance_correction", "none", "none"),
        ("model.gradient_checkpointing", "true", True),
        ("model.chat_template_kwargs", '{"enable_thinking": false}', {"enable_thinking": False}),
        ("lora.target_modules", "q_proj, v_proj", ["q_proj", "v_proj"]),
        ("lora.target_modules", "none", None),
        ("track.report_to", "none", []),
        ("track.report_to", "wandb,tensorboard", ["wandb", "tensorboard"]),
    ],
)
def test_options_are_read_by_their_type(cli, option, text, value):
    config = yaml.safe_load(cli("config", f"--{option}", text).out)
    section, key = option.split(".")
    assert config[section][key] == value


def test_yaml_of_other_trainers_is_translated(cli):
    Path("run.yaml").write_text(
        """
        model: {name: palestra/tiny, max_new_tokens: 99}
        rl:
          training: {per_device_train_batch_size: 3, learning_rate: 2e-5, num_train_epochs: 2, max_steps: 7}
          generation: {num_generations: 5, temperature: 0.9, top_p: 0.95}
        wandb: {enabled: true, project: shop, entity: me}
        """
    )
    config = RunConfig.build(yaml.safe_load(cli("config", "--config", "run.yaml").out))
    assert (config.train.problems_per_step, config.train.learning_rate) == (3, 2e-5)
    assert (config.train.epochs, config.train.max_steps) == (2, 7)
    assert (config.rollout.group_size, config.rollout.temperature, config.rollout.top_p) == (5, 0.9, 0.95)
    assert config.rollout.max_new_tokens == 99
    assert (config.track.report_to, config.track.project, config.track.entity) == (["wandb"], "shop", "me")


def test_yaml_may_merge_by_anchors_and_have_empty_sections(cli):
    Path("run.yaml").write_text("rollout: {<<: {top_p: 0.5, top_k: 3}, top_k: 4}\n")
    rollout = yaml.safe_load(cli("config", "--config", "run.yaml").out)["rollout"]
    assert (rollout["top_p"], rollout["top_k"]) == (0.5, 4)
    Path("run.yaml").write_text("train:\nrl:\n  training:\n")
    assert cli("config", "--config", "run.yaml").out == cli("config").out


def test_missing_run_is_answered_with_the_recent_ones(cli):
    for name in ("clerk-1", "clerk-2"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "run.json").write_text("{}")
    answer = cli.error("train", "--resume", "clerk-3")
    assert "runs/clerk-1" in answer
    assert "runs/clerk-2" in answer


def test_debug_shows_the_traceback(cli, monkeypatch):
    with pytest.raises(NotFoundError):
        cli("train", "nope.py", "--debug")


def test_a_full_disk_is_told_in_one_sentence(cli, monkeypatch):
    def full(config, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(RunConfig, "save", full)
    answer = cli.error("train", "--train.max_steps", "1")
    assert "No space left on device" in answer
    assert "free some space" in answer
