"""GEPA's search over texts, with a made-up agent whose score depends on the rules that its texts contain."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from palestra.core.chat_model import BudgetSpent
from palestra.core.errors import SettingError
from palestra.extras.improve.search import (
    Candidate,
    Search,
    Trial,
    choose_parent,
    front,
)

CASES = [f"c{i}" for i in range(8)]


def candidate(number: int, scores: Sequence[float]) -> Candidate:
    return Candidate(number, {"a": "", "b": ""}, dict(zip(CASES, scores, strict=False)))


def test_the_front_has_who_is_best_on_some_case_and_no_dominated_one():
    one, two = candidate(0, [1, 0, 0]), candidate(1, [0, 1, 0])
    both, nobody = candidate(2, [1, 1, 0]), candidate(3, [0, 0, 0])
    assert front([one, two]) == {0: 2, 1: 2}  # on the third case all are equal
    assert list(front([one, two, both, nobody])) == [2]


def test_parents_are_drawn_by_the_cases_on_which_they_are_best():
    often, rarely = candidate(0, [1, 1, 1, 0]), candidate(1, [0, 0, 0, 1])
    drawn = [choose_parent([often, rarely], random.Random(i)).number for i in range(400)]
    assert 0.65 < drawn.count(0) / 400 < 0.85
    assert 1 in drawn


def search(reflect=None, components=("a", "b"), **limits: int) -> tuple[Search, list[str]]:
    """Even cases need the rule A in text a, odd ones the rule B in text b."""
    events: list[str] = []

    async def evaluate(texts, cases):
        needed = [("a", "A") if int(case[1:]) % 2 == 0 else ("b", "B") for case in cases]
        scores = [float(rule in texts[name]) for name, rule in needed]
        return [Trial(c, s, c, f"needs {n[1]}") for c, s, n in zip(cases, scores, needed, strict=True)]

    async def write_rules(texts, component, trials, seed):
        wanted = {trial.feedback[-1] for trial in trials if not trial.score}
        rule = {"a": "A", "b": "B"}[component]
        return f"{texts[component]} {rule}" if rule in wanted else None

    return Search(evaluate, reflect or write_rules, CASES, CASES, components, events.append, **limits), events


def test_the_search_finds_both_rules_within_its_budget():
    found, events = search(budget=120, minibatch=3, seed=1)
    best = asyncio.run(found.run({"a": "", "b": ""}))
    assert best.mean == 1.0
    assert "A" in best.texts["a"]
    assert "B" in best.texts["b"]
    assert found.used <= 120
    assert found.candidates[0].mean == 0.0
    assert len(events) == len(found.candidates)


def test_only_the_chosen_components_change():
    found, _ = search(budget=120, minibatch=3, components=["a"])
    best = asyncio.run(found.run({"a": "", "b": ""}))
    assert best.texts["b"] == ""
    assert best.mean == 0.5


def test_a_text_that_does_not_help_on_its_minibatch_is_not_kept():
    async def useless(texts, component, trials, seed):
        return f"{seed}"

    found, _ = search(useless, budget=100, minibatch=4)
    assert asyncio.run(found.run({"a": "", "b": ""})).number == 0
    assert len(found.candidates) == 1
    assert found.rejected > 5


def test_a_reflector_whose_budget_is_spent_ends_the_search_with_what_it_has():
    async def spent(texts, component, trials, seed):
        raise BudgetSpent("max_calls=3")

    found, events = search(spent, budget=100, minibatch=4)
    assert asyncio.run(found.run({"a": "", "b": ""})).number == 0
    assert "max_calls=3" in events[-1]


def test_a_budget_too_small_for_one_step_is_rejected():
    found, _ = search(budget=12, minibatch=4)
    with pytest.raises(SettingError, match="at least 16"):
        asyncio.run(found.run({"a": "", "b": ""}))
