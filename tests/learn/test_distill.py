"""The embedded model on the demo task learns from a copy of itself that was trained by GRPO."""

from pathlib import Path
from typing import Any

import pytest

from palestra import demo, train_grpo
from palestra.core.config import RunConfig
from palestra.result import GRPOTrainingResult

SHORT = {"train.problems_per_step": 8, "train.scheduler": "constant", "eval.cases": 24}


def train(folder: Path, *layers: dict[str, Any]) -> GRPOTrainingResult:
    config = RunConfig.build(demo.config, SHORT, *layers, {"output_dir": str(folder)})
    return train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out)


@pytest.mark.slow("make test-slow trains a teacher first")
def test_a_model_learns_from_a_better_one_without_rewards(tmp_path: Path) -> None:
    teacher = train(tmp_path / "teacher", {"train.max_steps": 8})
    distill = {"coefficient": 1.0, "only": True, "teacher": str(teacher.model_path)}
    student = train(tmp_path / "student", {"train.max_steps": 8, "distill": distill})
    assert student.before.pass_rate.rate < 0.5
    assert student.after.pass_rate.rate > 0.75
    assert student.metrics[0]["teacher_gain"] > 0.1
    assert student.metrics[-1]["distill_divergence"] < 0.3 * student.metrics[0]["distill_divergence"]
