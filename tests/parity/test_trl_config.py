"""GRPOConfig of palestra.trl against TRL's own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from palestra import GRPOTrainer
from palestra.extras.trl.config import DEFAULTS, problem_of

trl = pytest.importorskip("trl")
OWN_DEFAULTS = {"gradient_checkpointing", "project"}  # documented in docs/python.md


def test_supported_arguments_have_trls_defaults() -> None:
    theirs = {f.name: f.default for f in fields(trl.GRPOConfig)}
    assert DEFAULTS.keys() <= theirs.keys()
    differ = {name for name, value in DEFAULTS.items() if value != theirs[name]}
    assert differ == OWN_DEFAULTS


def test_every_argument_of_trls_is_supported_without_effect_or_rejected_by_name() -> None:
    others = [f.name for f in fields(trl.GRPOConfig) if f.name not in DEFAULTS]
    unknown = [name for name in others if "known here" in problem_of(name, 1, ())]
    assert unknown == []


def test_trls_own_config_object_is_read() -> None:
    values: dict[str, Any] = {"use_cpu": True, "bf16": False, "num_generations": 4, "beta": 0.04}
    args = trl.GRPOConfig(output_dir="out", lr_scheduler_type="cosine", per_device_train_batch_size=4, **values)
    rows = [{"prompt": "2 + 2 = "}]
    config = GRPOTrainer(model="palestra/tiny", reward_funcs=len, args=args, train_dataset=rows).config
    assert (config.rollout.group_size, config.train.problems_per_step, config.train.beta) == (4, 1, 0.04)
    assert (config.train.scheduler, config.model.dtype, config.train.learning_rate) == ("cosine", "float32", 1e-6)
