"""Score the policy on some problems, without training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from palestra.core.types import Group, Problem
from palestra.evals.report import EvalReport
from palestra.rollout.collect import OnRollout, require_one_good


class CollectsGroups(Protocol):
    """What turns problems into groups: attempts by a policy or an endpoint, or a user's function."""

    async def collect(
        self, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], on_rollout: OnRollout = ...
    ) -> list[Group]: ...

    def groups_at_once(self, group_size: int) -> int:
        """How many groups may be in progress together."""
        ...


@runtime_checkable
class PreparesGroups(Protocol):
    """A collector that can begin before the policy may be asked."""

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Make ready what needs no policy, for the problems that `collect` will be given next."""
        ...

    def abandon(self) -> None:
        """Nobody will collect what was prepared."""
        ...


async def evaluate(
    collector: CollectsGroups,
    problems: Sequence[Problem],
    *,
    samples_per_case: int = 1,
    seed: int = 0,
    on_rollout: OnRollout = lambda r: None,
) -> EvalReport:
    """Attempt every problem `samples_per_case` times and report pass rates with their intervals."""
    began = time.perf_counter()
    keys = [f"eval/{seed}/{problem.own_id}" for problem in problems]
    groups = await collector.collect(problems, samples_per_case, keys, on_rollout)
    require_one_good(groups)
    rollouts = [r for group in groups for r in group.rollouts]
    return EvalReport.of(rollouts, seconds=time.perf_counter() - began)
