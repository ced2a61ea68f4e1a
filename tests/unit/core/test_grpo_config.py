"""The flat config in the words of TRL and peft."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from palestra.core.grpo_config import GRPOTrainingConfig


def test_the_adapter_is_the_one_that_training_builds() -> None:
    pytest.importorskip("peft")
    from palestra.learner.lora import build_peft_config

    config = GRPOTrainingConfig(
        use_lora=True, lora_r=8, lora_alpha=24, lora_dropout=0.1, lora_target_modules=["q_proj"]
    )
    adapter = config.build_peft_config()
    assert adapter is not None
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (8, 24, 0.1)
    assert adapter.target_modules == {"q_proj"}
    assert adapter.to_dict() == build_peft_config(config.to_run_config().lora).to_dict()


def test_without_lora_there_is_no_adapter_config_and_four_bits_imply_one_on_all_linear_layers() -> None:
    pytest.importorskip("peft")
    assert GRPOTrainingConfig().build_peft_config() is None
    adapter = GRPOTrainingConfig(load_in_4bit=True, use_vllm=True).build_peft_config()
    assert adapter is not None
    assert (adapter.r, adapter.target_modules) == (16, "all-linear")


def trl_config(folder: Path, **values: Any) -> Any:
    pytest.importorskip("trl")
    return GRPOTrainingConfig(output_dir=str(folder), **values).to_trl_config()


def test_trl_gets_the_same_settings_under_its_names(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 4,
        "learning_rate": 3e-6,
        "max_grad_norm": 0.5,
        "num_generations": 8,
        "max_completion_length": 300,
        "temperature": 0.7,
        "mask_truncated_completions": False,
        "gradient_checkpointing": True,
        "max_tool_calling_iterations": 7,
        "vllm_mode": "server",
        "vllm_gpu_memory_utilization": 0.4,
        "vllm_tensor_parallel_size": 2,
        "seed": 11,
        "save_strategy": "steps",
        "save_steps": 20,
        "logging_steps": 3,
        "max_steps": 40,
    }
    theirs = trl_config(tmp_path, **values, per_device_batch_size=2, vllm_max_model_len=512, torch_dtype="float32")
    assert {name: getattr(theirs, name) for name in values} == values
    assert theirs.vllm_max_model_length == 512
    assert theirs.model_init_kwargs == {"dtype": "float32"}
    assert theirs.output_dir == str(tmp_path)
    assert theirs.report_to in ("none", [])


def test_trl_sees_as_many_problems_a_step_as_we_do(tmp_path: Path) -> None:
    ours = GRPOTrainingConfig(per_device_batch_size=3, gradient_accumulation_steps=2, num_generations=4)
    theirs = trl_config(tmp_path, per_device_batch_size=3, gradient_accumulation_steps=2, num_generations=4)
    completions = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert completions // theirs.num_generations == ours.to_run_config().train.problems_per_step == 6


def test_trl_gets_our_objective(tmp_path: Path) -> None:
    from palestra.algo.losses import Objective

    theirs, ours = trl_config(tmp_path), GRPOTrainingConfig().to_run_config().train
    assert theirs.max_steps == -1, "all epochs"
    assert theirs.loss_type == ours.loss
    assert (theirs.epsilon, 1 + theirs.epsilon_high) == (ours.epsilon, Objective(epsilon_high=ours.epsilon_high).upper)
    assert (theirs.beta, theirs.num_iterations) == (ours.beta, ours.iterations)
    assert (theirs.scale_rewards, theirs.importance_sampling_level) == (ours.advantage_scale, ours.ratio)
    assert (theirs.lr_scheduler_type, theirs.warmup_steps) == (ours.scheduler, ours.warmup_steps)
    assert (theirs.weight_decay, theirs.adam_beta1, theirs.adam_beta2) == (
        ours.weight_decay,
        ours.adam_beta1,
        ours.adam_beta2,
    )


def test_what_trl_lacks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="palestra"):
        trl_config(tmp_path, world_model_coeff=0.05)
    assert "no ECHO" in caplog.text
