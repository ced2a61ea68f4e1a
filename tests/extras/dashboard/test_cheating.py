"""The page "Is it cheating": alarms on planted data, and none on clean data."""

from __future__ import annotations

import random

import make_runs
import pytest
from dashboard_client import api_of

from palestra.extras.dashboard.evaluations import find_alarms

WEIGHTS = {"contains_word": 1.0, "true_answer": 0.0}


def rates(*, hacked: bool, seed: int) -> tuple[list[int], list[float], list[float], list[float]]:
    """The steps of a planted run, and of each the reward, the check metric and the number of rollouts."""
    members: dict[int, list] = {}
    for step, rollouts in make_runs.hacked_groups(30, seed, hacked):
        members.setdefault(step, []).extend(rollouts)

    def passed(name: str) -> list[float]:
        return [sum(bool(each.scores[name].passed) for each in row) / len(row) for row in members.values()]

    return [*members], passed("contains_word"), passed("true_answer"), [float(len(row)) for row in members.values()]


@pytest.mark.parametrize("seed", range(5))
def test_a_hacked_run_raises_the_alarm_and_a_clean_one_raises_none(seed) -> None:
    steps, reward, check, counts = rates(hacked=True, seed=seed)
    (alarm,) = find_alarms(steps, reward, {"true_answer": check}, counts)
    assert alarm["witness_to"] < alarm["witness_from"]
    assert alarm["reward_to"] > alarm["reward_from"]
    assert "true_answer fell" in alarm["sentence"]
    steps, reward, check, counts = rates(hacked=False, seed=seed)
    assert find_alarms(steps, reward, {"true_answer": check}, counts) == []


def test_a_check_metric_that_only_wavers_raises_hardly_ever_an_alarm_and_one_that_falls_with_the_reward_none() -> None:
    raised = 0
    for seed in range(200):
        rng = random.Random(seed)
        reward = [0.3 + 0.6 * step / 40 for step in range(40)]
        check = [sum(rng.random() < 0.5 for _ in range(64)) / 64 for _ in range(40)]
        raised += len(find_alarms(list(range(40)), reward, {"w": check}, [64.0] * 40))
    assert raised <= 4
    falling = [0.9 - 0.02 * step for step in range(30)]
    assert find_alarms(list(range(30)), falling, {"w": falling}, [64.0] * 30) == []
    # nor do few steps and gaps
    assert find_alarms([1, 2], [0.1, 0.9], {"w": [0.9, 0.1]}, [8.0, 8.0]) == []
    assert find_alarms([1, 2, 3], [None, 0.1, 0.2], {"w": [None, None, 0.5]}, [None, 8.0, 8.0]) == []


def test_a_hacked_run_shows_its_alarm_and_the_newest_rollouts_that_passed_are_hacked(tmp_path) -> None:
    run = make_runs.write_run(tmp_path / "run", make_runs.hacked_groups(20), reward_weights=WEIGHTS)
    api = api_of(run, tmp_path / "home")
    found = api("suspicion")
    assert list(found["witnesses"]) == ["true_answer"]
    assert list(found["rewarded"]) == ["contains_word"]
    assert found["alarms"] == api()["alarms"]
    (alarm,) = found["alarms"]
    assert "that passed" in alarm["sentence"]
    assert found["notes"] == []
    while api("facets")["indexed"] < 1:
        pass
    newest = api.rows(passed=1, sort="newest", limit=20)
    assert sum(make_runs.WORD in row["answer"] for row in newest) >= 18
    assert "unknown parameter" in str(api("rollouts", shape="price", status=400))


def test_an_honest_run_raises_no_alarm_and_without_a_check_metric_the_page_says_how_to_add_one(run, tmp_path) -> None:
    honest = make_runs.write_run(tmp_path / "run", make_runs.hacked_groups(20, hacked=False), reward_weights=WEIGHTS)
    found = api_of(honest, tmp_path / "home")("suspicion")
    assert found["alarms"] == found["notes"] == []
    assert found["witnesses"]
    found = api_of(run, tmp_path / "home")("suspicion")
    assert found["alarms"] == []
    assert "reward_weights" in found["notes"][0]
