"""What the findings of a run without signal recommend helps: the same run with `--warm-start auto` learns."""

from pathlib import Path
from typing import Any

from palestra import demo, train_grpo
from palestra.core.config import RunConfig
from palestra.result import GRPOTrainingResult

CASES = [case for case in demo.make_cases(48, held_out=False, seed=1) if "together" in case["question"]]
# At this temperature the embedded model calls one tool instead of three, and never says anything else.
COLD = {
    "rollout.temperature": 0.1, "rollout.group_size": 4, "rollout.max_new_tokens": 100, "train.problems_per_step": 2,
    "train.max_steps": 3, "train.learning_rate": 1e-3, "stages.rft_attempts": 16, "stages.rft_pass": 128,
    "stages.rft_rounds": 1, "model.threads": 1,
}  # fmt: skip


def train(folder: Path, **settings: Any) -> GRPOTrainingResult:
    config = RunConfig.build(COLD, {name.replace("__", "."): value for name, value in settings.items()})
    suite = demo.make_suite(CASES)
    return train_grpo(demo.agent, suite, config=config, held_out=0.25, progress=False, folder=folder)


def test_a_run_in_which_nothing_passes_learns_with_the_warm_start_that_its_finding_names(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    assert [row["reward_max"] for row in plain.metrics] == [0.0] * 3
    (finding,) = plain.findings
    assert "--warm-start auto" in finding

    warm = train(tmp_path / "warm", stages__plan="auto")
    assert warm.before is not None
    assert warm.after is not None
    assert warm.before.pass_rate.rate == 0.0
    assert warm.after.pass_rate.rate >= 0.75  # of four cases
    assert not any("--warm-start" in finding for finding in warm.findings)
