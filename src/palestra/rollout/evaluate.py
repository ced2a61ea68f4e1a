"""Score the policy on a split, without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from palestra.core.types import Problem, Rollout
from palestra.evals.report import EvalReport
from palestra.rollout.collect import Collector


async def evaluate(
    collector: Collector,
    problems: Sequence[Problem],
    *,
    samples_per_case: int = 1,
    seed: int = 0,
    on_rollout: Callable[[Rollout], None] = lambda r: None,
) -> EvalReport:
    """Attempt every problem `samples_per_case` times and report pass rates with their intervals."""
    began = time.perf_counter()
    groups = await collector.collect(problems, samples_per_case, f"eval/{seed}", on_rollout)
    rollouts = [r for group in groups for r in group.rollouts]
    return EvalReport.of(rollouts, seconds=time.perf_counter() - began)
