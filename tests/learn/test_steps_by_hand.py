"""GRPO by hand: the reward rises, with all weights and with an adapter."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from palestra.core.config import RunConfig
from palestra.core.config_sections import LoraSection
from palestra.learner.lora import add_lora
from palestra.train import StepTrainer

ROWS = [("Say something.", "e"), ("Count to three.", "e"), ("Who are you?", "e")]


def share_of_letter(output: str, expected_answer: str) -> float:
    return output.count(expected_answer) / max(len(output), 1)


def settings(folder: Path, **more: Any) -> RunConfig:
    """Enough siblings and steps for the reward to rise with any seed tried."""
    base = {
        "output_dir": str(folder),
        "track": {"run_name": "run"},
        # A random model seldom ends by itself.
        "train": {"learning_rate": 1e-2, "max_steps": 15, "problems_per_step": 2, "mask_truncated": False},
        "rollout": {"group_size": 16, "max_new_tokens": 8, "temperature": 1.0},
    }
    return RunConfig.build(base, more)


def test_the_reward_rises_when_all_weights_train(tiny: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    random_model = AutoModelForCausalLM.from_config(tiny.model.config)  # it says anything, so rewards have variance
    history = StepTrainer(random_model, tiny.tokenizer, share_of_letter, settings(tmp_path)).train(ROWS)
    rewards = history["reward"]
    assert statistics.fmean(rewards[-3:]) > 2 * statistics.fmean(rewards[:3])


@pytest.mark.slow
def test_the_reward_rises_when_only_an_adapter_trains(tiny: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = add_lora(tiny.model, LoraSection(r=8))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    lively = {"train.beta": 0.01, "rollout.max_new_tokens": 12, "rollout.temperature": 1.2}
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "e"} for text in ("Hello!", "What is 12 + 30?")]
    trainer = StepTrainer(model, tiny.tokenizer, share_of_letter, settings(tmp_path, **lively))
    history = trainer.train(rows)
    rewards = history["reward"]
    assert statistics.fmean(rewards[-3:]) > 1.5 * statistics.fmean(rewards[:3])
    assert max(row.get("kl_reference", 0.0) for row in history["rows"]) > 0
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    assert (trainer.folder / "final" / "adapter_model.safetensors").is_file()
    assert not (trainer.folder / "final" / "model.safetensors").exists()
