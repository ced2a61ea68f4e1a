"""`palestra plan`: an estimate as a table and as JSON, from names, folders and configs."""

import json
from pathlib import Path

import pytest

from palestra.plan.device import find_device

pytestmark = pytest.mark.extras

H200_GIB = find_device("h200").memory_gib
TINY = Path(__file__).parents[2] / "src" / "palestra" / "models" / "tiny"


def test_a_plan_tells_time_memory_cost_bottleneck_and_what_fits(cli):
    answer = cli.ok("plan", *"--model qwen3-8b --gpus 8 --context 8k --group 16 --problems 64 --price 3.5".split())
    assert "qwen3-8b: 8.19 B weights, all weights, on 8 × h200; 64 × 16 rollouts of 6144 + 2048 tokens" in answer.out
    for word in ("prefill", "decode", "learner", "optimizer", "gradients", "activations", "bottleneck: ", "fit"):
        assert word in answer.out
    assert "and cost " in answer.out


def test_json_holds_the_numbers_of_the_table(cli):
    answer = cli("plan", *"--model qwen3-0.6b --context 2k --group 8 --problems 8 --price 2 --steps 50 --json".split())
    found = json.loads(answer.out)
    assert found["step_s"] == pytest.approx(found["sampling_s"] + found["learning_s"], abs=1e-3)
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"], abs=2e-3)
    assert sum(found["memory_parts_gib"].values()) == pytest.approx(found["memory_gib"], abs=0.02)
    assert found["cost"] == pytest.approx(found["step_s"] * 50 / 3600 * 2, abs=0.01)
    assert found["fits"] is True
    assert found["memory_needed_gib"] <= found["memory_usable_gib"] == pytest.approx(0.9 * H200_GIB, abs=0.01)
    assert "H200" in found["calibration"]


def test_what_does_not_fit_is_told_with_the_settings_that_would(cli):
    answer = cli.ok("plan", *"--model qwen3-8b --context 4k --group 8 --gpu rtx-4090".split())
    assert "and 90% can be planned with; use " in answer.out
    assert "--lora." in answer.out
    assert "a step then takes" in answer.out
    assert "it fits: " in cli("plan", *"--model qwen3-0.6b --context 2k".split()).out


def test_a_folder_a_yaml_file_and_settings_of_a_run_are_taken(cli, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model: {{name: {TINY}}}\ntrain: {{problems_per_step: 3, max_steps: 7}}\nrollout: {{max_new_tokens: 64}}\n"
    )
    found = cli.json("plan", "--config", "run.yaml", "--rollout.group_size", "5", "--gpu", "cpu")
    assert found["parameters"] == pytest.approx(754816, rel=0.01)
    assert (found["steps"], found["rows_at_once"]) == (7, 15)


def test_a_gpu_that_is_not_listed_is_described(cli):
    answer = cli("plan", *"--model qwen3-4b --gpu mine --memory-gib 200 --bandwidth 6 --tflops 1500 --json".split())
    assert json.loads(answer.out)["device"] == "mine"


def test_the_known_models_are_listed(cli):
    assert "qwen3-32b         32.762 B weights" in cli("plan", "--models").out
