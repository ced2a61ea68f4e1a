"""Score the policy on a split, without training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from palestra.core.types import Group, Problem, Rollout
from palestra.evals.report import EvalReport


class Collects(Protocol):
    """What turns problems into groups: a Collector of tokens, or a ChatCollector of messages."""

    async def collect(
        self, problems: Sequence[Problem], group_size: int, seed_key: str, on_rollout: Callable[[Rollout], None] = ...
    ) -> list[Group]: ...


async def evaluate(
    collector: Collects,
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
