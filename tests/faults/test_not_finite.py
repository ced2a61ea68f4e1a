"""Weights that are not finite stop the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from palestra import demo, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import TrainingError

SMALL = {"train.max_steps": 4, "train.problems_per_step": 2, "eval.cases": 2, "train.filter_equal_groups": False}


def test_a_model_with_broken_weights_is_told_before_any_training(tmp_path: Path, tiny: Any) -> None:
    with torch.no_grad():
        next(p for name, p in tiny.model.named_parameters() if "mlp" in name)[0, 0] = float("inf")
    tiny.model.save_pretrained(tmp_path / "sick")
    tiny.tokenizer.save_pretrained(tmp_path / "sick")
    config = RunConfig.build(demo.config, SMALL, {"output_dir": str(tmp_path / "runs")})
    agent = demo.Agent("a", str(tmp_path / "sick"), demo.agent.instructions, demo.agent.tools)
    with pytest.raises(TrainingError, match="not finite; its weights may be broken"):
        train_grpo(agent, demo.suite, config=config, held_out=demo.held_out)
