"""train.sampling = learnable in the loop: outcomes reach the source, and a resumed run draws the same problems."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import PROBLEMS, FakeCollector, FakePolicy, attempt, make_loop

from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.types import Group
from palestra.evals.case_rates import CaseRates
from palestra.train.checkpoint import read_checkpoint, step_folder
from palestra.train.group_queue import GroupQueue
from palestra.train.group_source import ProblemSource

SOLVED, HOPELESS = {"0", "1", "2", "3"}, {"4", "5", "6"}
LEARNABLE = {"train.sampling": "learnable", "rollout.group_size": 8}


@dataclass
class Sizes(FakeCollector):
    """Notes each problem with the size of its group; three of ten problems have signal."""

    drawn: list[tuple[str, int]] = field(default_factory=list)

    async def collect(self, problems: Any, group_size: int, seed_keys: Any, on_rollout: Any = None) -> list[Group]:
        self.drawn += [(p.id, group_size) for p in problems]

        def rewards(case: str) -> list[float]:
            if case in SOLVED | HOPELESS:
                return [float(case in SOLVED)] * group_size
            return [float(i % 2) for i in range(group_size)]

        version = self.policy.version
        return [Group(p.id, tuple(attempt(p.id, r, version=version) for r in rewards(p.id))) for p in problems]


def learnable_loop(steps: int, checkpoints: Path | None = None, *, queue: bool = False) -> tuple[Any, Sizes]:
    collector, rates = Sizes([], FakePolicy([])), CaseRates(1000.0)
    source: Any = ProblemSource(collector, PROBLEMS, {}, 8, 0, gives_back=False, rates=rates)
    if queue:
        source = GroupQueue(source, per_step=2, max_staleness=2)
    loop = make_loop(LEARNABLE, steps=steps, source=source, checkpoints=checkpoints)
    loop.training.rates, collector.policy = rates, loop.policy
    return loop, collector


def test_most_samples_go_to_problems_with_signal_and_others_are_retested_with_few() -> None:
    loop, collector = learnable_loop(steps=40)
    loop.training.run()
    later = collector.drawn[20:]
    counts = Counter("learnable" if case not in SOLVED | HOPELESS else "settled" for case, _ in later)
    assert counts["learnable"] > 3 * counts["settled"]
    assert {size for case, size in later if case in SOLVED} <= {2}
    assert len({case for case, _ in collector.drawn}) == len(PROBLEMS)
    assert loop.rows[-1]["learnable_cases"] == 3
    assert loop.rows[-1]["solved_cases"] == 4


def test_a_resumed_run_draws_the_problems_that_would_have_come_next(tmp_path: Path) -> None:
    whole, drawn = learnable_loop(12)
    whole.training.run()
    first, _ = learnable_loop(6, tmp_path)
    first.training.run()
    folder = step_folder(tmp_path, 6)
    second, again = learnable_loop(12)
    second.training.resume(folder, read_checkpoint(folder))
    second.training.run()
    assert again.drawn == drawn.drawn[-len(again.drawn) :]
    assert second.training.state.cases == whole.training.state.cases
    assert second.training.state.source == whole.training.state.source


def test_groups_sampled_ahead_are_observed_when_they_are_trained() -> None:
    loop, collector = learnable_loop(30, queue=True)
    loop.training.run()
    loop.training.source.close()
    later = [case for case, _ in collector.drawn[24:]]
    assert sum(case not in SOLVED | HOPELESS for case in later) > 0.4 * len(later)


def test_a_problem_whose_attempts_all_failed_stays_among_the_candidates() -> None:
    rates = CaseRates(1000.0)
    source = ProblemSource(Sizes([], FakePolicy([])), PROBLEMS[:1], {}, 8, 0, rates=rates)
    source.next(1, 0).close()
    failed = Group("0", (attempt("0", 0.0, error="gone"),))
    source.observe([failed], [[0.0]], 1)
    assert [c.index for c in source._choose(1)] == [0]


def test_the_half_life_is_for_learnable_sampling() -> None:
    with pytest.raises(SettingError, match="half_life"):
        RunConfig.build({"train.sampling_half_life": 5})
