"""Which cases are sampled next, by the pass rate of each."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from builders import group

from palestra.evals.case_rates import CaseRates, _all_alike, retest_size

SIZE = 8


def rates_of(passes: dict[str, int], half_life: float = 30.0) -> CaseRates:
    rates = CaseRates(half_life)
    for index, (case, passed) in enumerate(passes.items()):
        rates.add(case, index, passed=passed, failed=SIZE - passed)
    return rates


def chosen(rates: CaseRates, draws: int, count: int = 2, fresh: tuple[int, ...] = ()) -> Counter[int]:
    return Counter(c.index for i in range(draws) for c in rates.choose(count, fresh, f"0/{i}", SIZE))


def test_cases_that_are_solved_sometimes_come_more_often() -> None:
    rates = rates_of({"never": 0, "half": 4, "most": 6, "always": 8})
    counts = chosen(rates, 500)
    assert counts[1] + counts[2] > 0.8 * counts.total()
    assert min(counts[0], counts[3]) > 0, "solved and hopeless cases are tested again"


def test_no_case_comes_twice_in_a_draw_unless_there_are_too_few() -> None:
    rates = rates_of({str(i): 4 for i in range(5)})
    assert len({c.index for c in rates.choose(5, (), "0/0", SIZE)}) == 5
    assert len(rates.choose(7, (), "0/0", SIZE)) == 7
    assert {c.index for c in rates.choose(2, (), "0/0", SIZE, without={"0", "1", "2"})} == {3, 4}


def test_untested_cases_are_tried_in_order() -> None:
    rates = rates_of({"never": 0, "always": 8})
    first = rates.choose(3, (7, 9, 5), "0/0", SIZE)
    fresh = [c.index for c in first if c.is_fresh]
    assert len(fresh) >= 2
    assert fresh == [7, 9, 5][: len(fresh)]


def test_evidence_fades_so_that_settled_cases_come_back() -> None:
    rates = rates_of({"never": 0, "half": 4, "always": 8}, half_life=10)
    before = chosen(rates, 400, count=1)
    rates.step = 40
    after = chosen(rates, 400, count=1)
    assert after[0] > 2 * before[0]
    assert after[2] > 2 * before[2]
    assert [rates_of({"always": 8}).kind("always", SIZE), rates.kind("always", SIZE)] == ["solved", "learnable"]


def test_only_cases_whose_outcome_is_nearly_certain_are_retested_with_few_attempts() -> None:
    rates = rates_of({"never": 0, "once": 1, "half": 4, "always": 8})
    retested = {c.index for c in rates.choose(4, (), "0/0", SIZE) if c.retests}
    assert retested == {0, 3}
    assert [retest_size(size) for size in (2, 4, 8, 16)] == [2, 2, 2, 4]


def test_a_group_counts_by_its_verdicts_and_failed_rollouts_say_nothing() -> None:
    rates = CaseRates(30)
    places = {"a": 0, "b": 1, "c": 2}.get
    rates.observe(
        [group(1, 0, 0, problem="a"), group(0.2, 0.4, problem="b"), group(0, problem="c", error="gone")],
        [True, True, False],
        3,
        places,
    )
    known = {case: (e.passed, e.failed, e.step) for case, e in rates.cases.items()}
    assert known == {"a": (1, 2, 3), "b": (1, 1, 3), "c": (0, 0, 3)}, (
        "rewards that differ below the threshold count half"
    )
    rates.observe([group(1.0, problem="x")], [False], 4, places)
    assert "x" not in rates.cases


def test_rates_survive_a_checkpoint_exactly() -> None:
    rates = rates_of({"a": 3, "b": 5, "c": 0})
    rates.step = 7
    rates.add("a", 0, passed=1, failed=7)
    again = CaseRates(30.0)
    again.load(json.loads(json.dumps(rates.to_dict())), 7)
    assert again == rates
    assert again.choose(2, (5,), "0/3", SIZE) == rates.choose(2, (5,), "0/3", SIZE)


def test_the_probability_of_a_mixed_group_equals_a_simulation() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(1.5, 4.5, 200_000)
    assert _all_alike(1.5, 4.5, 4) == pytest.approx(float(np.mean(p**4 + (1 - p) ** 4)), abs=2e-3)
