"""Training with `rollout.constrain_tool_calls`: it runs, and the sampler's distance from the learner is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from palestra import demo, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.env_api import collectors
from palestra.policy.openai import OpenAISettings
from palestra.train import StepTrainer

# hot enough for calls to go wrong
STEP = {"train.max_steps": 1, "train.problems_per_step": 4, "train.filter_equal_groups": False, "eval.cases": 2}
STEP |= {"rollout.temperature": 1.6}
ON = {"rollout.constrain_tool_calls": True}


def train(folder: Path, *layers: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The metrics of one step, and what the tools answered."""
    config = RunConfig.build(demo.config, STEP, *layers, {"output_dir": str(folder)})
    result = train_grpo(demo.agent, demo.suite, config=config, held_out=demo.held_out)
    (path,) = folder.glob("*/rollouts.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [m["text"] for row in rows for m in row["messages"] if m["role"] == "tool"]
    return result.metrics[0], answers


def is_misuse(answer: str) -> bool:
    """A call that did not reach its tool; a tool that refuses an unknown item is none."""
    return answer.startswith("Error") and " raised " not in answer


def test_a_step_with_constrained_calls_has_no_malformed_one_and_a_ratio_of_one(tmp_path: Path) -> None:
    free, free_answers = train(tmp_path / "free")
    held, held_answers = train(tmp_path / "held", ON)
    assert any(map(is_misuse, free_answers))
    assert held_answers
    assert not any(map(is_misuse, held_answers))
    assert held["ratio_mean"] == pytest.approx(1.0)
    assert abs(free["kl_sampler"]) < 1e-6 < held["kl_sampler"]


def test_where_others_sample_the_setting_is_refused(tmp_path: Path, tiny: Any) -> None:
    config = RunConfig.build(ON, {"output_dir": str(tmp_path)})
    with pytest.raises(SettingError, match="constrain_tool_calls = True has no effect here: StepTrainer"):
        StepTrainer(tiny.model, tiny.tokenizer, lambda *_: 0.0, config)
    with pytest.raises(SettingError, match="constrain_tool_calls = True has no effect here: the endpoint"):
        collectors(config, OpenAISettings.read({"model_name": "m"}), training=True)
