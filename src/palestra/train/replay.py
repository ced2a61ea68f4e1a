"""Replay: a cross-entropy term on stored successes, added to the policy loss of grpo steps (`train.replay`).

The run stores a few rollouts that passed of each problem, behind the demonstrations of its earlier stages, and each
step learns some of them again. Problems that the step did not solve come first: GRPO learns nothing from their groups.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config_sections import TrainSection
from palestra.core.errors import SettingError, UnsupportedError
from palestra.core.types import Group, Rollout
from palestra.learner.base import Learner
from palestra.learner.local import LocalLearner
from palestra.rollout.hints import quality
from palestra.train.batch import to_batch
from palestra.train.demonstrations import DemonstrationStore, sampled_key
from palestra.train.rft import WORTH_IMITATING

PER_PROBLEM = 2
MAX_STORED = 4096  # with the demonstrations of earlier stages


@dataclass(frozen=True, slots=True)
class ReplayRows:
    """What a step replays."""

    rollouts: Sequence[Rollout]
    coefficient: float

    def parts(self, minibatches: int) -> list[tuple[Batch, StepLoss]]:
        """A batch with its loss for each optimizer step; the loss is `coefficient` times the mean over its tokens."""
        groups = [Group(rollout.problem_id, (rollout,)) for rollout in self.rollouts]
        batch = to_batch(groups, [[1.0]] * len(groups), mask_truncated=False)
        batch = replace(batch, advantages=self.coefficient * batch.advantages)
        parts = batch.minibatches(minibatches) if groups else []
        return [(part, StepLoss.of(part, Objective("cross_entropy"), max_completion_length=1)) for part in parts]

    def metrics(self, found: dict[str, float]) -> dict[str, float]:
        """Those of a part's outputs that are not about sampled tokens, with the cross-entropy itself."""
        own = {name: found[name] for name in ("loss", "tokens_computed") if name in found}
        return own | {"replay_loss": found["loss"] / self.coefficient}


@dataclass(slots=True)
class Replay:
    """The successes of a run. They are in its store's file, of which a checkpoint has the length."""

    store: DemonstrationStore
    seed: int
    per_problem: int = PER_PROBLEM
    max_stored: int = MAX_STORED

    def rows(self, groups: Sequence[Group], step: int, train: TrainSection) -> ReplayRows | None:
        """Stored successes that this step learns again; None if there are none."""
        chosen = self.choose(groups, step, train.problems_per_step)
        return ReplayRows(chosen, train.replay) if chosen else None

    def choose(self, groups: Sequence[Group], step: int, count: int) -> list[Rollout]:
        """Up to `count` successes, first of the problems that no rollout of the step solved.

        None if every rollout of the step passed: there is nothing to learn then.
        """
        if all(rollout.passed for group in groups for rollout in group.rollouts):
            return []
        unsolved = {group.problem_id for group in groups if not any(rollout.passed for rollout in group.rollouts)}
        stored = self.store.rollouts
        shuffled = random.Random(f"replay/{self.seed}/{step}").sample(stored, len(stored))
        return sorted(shuffled, key=lambda rollout: rollout.problem_id not in unsolved)[:count]

    def add(self, groups: Sequence[Group]) -> None:
        """Store successes of a step: a few of each problem, none twice, no guesses."""
        known, counts = set(map(sampled_key, self.store.rollouts)), Counter(r.problem_id for r in self.store.rollouts)
        new: list[Rollout] = []
        for rollout in (rollout for group in groups for rollout in group.rollouts if _is_success(rollout)):
            problem, key = rollout.problem_id, sampled_key(rollout)
            is_room = counts[problem] < self.per_problem and len(self.store) + len(new) < self.max_stored
            if is_room and key not in known:
                known.add(key)
                counts[problem] += 1
                new.append(rollout)
        self.store.add(new)


def replay_for(
    coefficient: float, learner: Learner, plan: Sequence[str], store: DemonstrationStore, seed: int
) -> Replay:
    """The replay of a run with `train.replay` above 0, checked."""
    if "grpo" not in plan:
        raise SettingError(f"train.replay = {coefficient:g} is for grpo steps, and stages.plan has none; set it to 0")
    if not isinstance(learner, LocalLearner):
        raise UnsupportedError(
            f"train.replay adds a second gradient to each step, which a {type(learner).__name__} does not support; "
            "train in one process with backend: local, or set train.replay to 0"
        )
    return Replay(store, seed)


def _is_success(rollout: Rollout) -> bool:
    return rollout.error is None and rollout.passed and not rollout.cut_off and quality(rollout) <= WORTH_IMITATING
