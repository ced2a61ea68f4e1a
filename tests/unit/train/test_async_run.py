"""A whole run that samples ahead of its steps, with the embedded model, and its resume."""

from pathlib import Path
from typing import Any

import pytest

from palestra import demo, train_grpo
from palestra.core.errors import SettingError
from palestra.core.run_folder import Resume

CONFIG = demo.config | {
    "rollout.max_staleness": 1, "train.max_steps": 2, "train.problems_per_step": 2, "rollout.group_size": 2,
    "rollout.max_new_tokens": 40, "eval.cases": 1, "checkpoint.every": 1, "train.filter_equal_groups": False,
}  # fmt: skip


def trained(**options: Any) -> Any:
    return train_grpo(demo.agent, demo.suite, held_out=demo.held_out, progress=False, **options)


def test_a_run_samples_ahead_within_its_limit_and_is_made_longer(tmp_path: Path) -> None:
    first = trained(config=CONFIG, folder=tmp_path)
    steps = [row for row in first.metrics if "sample_seconds" in row]
    assert [row["staleness_max"] for row in steps] == [0, 1]
    assert [row["rollouts"] for row in steps] == [4, 4]
    assert first.run.queue_file.is_file()
    longer = trained(resume=Resume(tmp_path, max_steps=3))
    seen = [row["problem_id"] for row in longer.run.rollouts()]
    assert len(seen) == 3 * 4
    assert len(set(seen)) == 6  # two problems a step, none of them twice


def test_a_rollout_func_is_refused_with_it(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"rollout\.max_staleness = 1 has no effect here: rollout_func may sample"):
        trained(config=CONFIG, rollout_func=lambda prompts, trainer: {}, folder=tmp_path)
