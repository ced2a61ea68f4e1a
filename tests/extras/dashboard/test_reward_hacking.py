"""Is a rising reward real: alarms and suspects on planted data, and none on clean data."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

import pytest

from palestra.extras.dashboard.reward_hacking import (
    AttemptSummary,
    find_alarms,
    find_clusters,
    spreading_phrases,
    suspects,
)

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

import make_runs

WORD = make_runs.WORD


@cache
def attempts(*, hacked: bool, seed: int, steps: int = 30) -> list[AttemptSummary]:
    made = []
    for step, rollouts in make_runs.hacked_groups(steps, seed, hacked):
        for rollout in rollouts:
            made.append(
                AttemptSummary(
                    id=len(made),
                    step=step,
                    success=bool(rollout.scores["contains_word"].passed),
                    tools=tuple(result.call.name for result in rollout.tool_results),
                    tokens=rollout.sampled_tokens,
                    text=rollout.messages[-1].text,
                    checks={"true_answer": bool(rollout.scores["true_answer"].passed)},
                )
            )
    return made


def rates(found: list[AttemptSummary]) -> tuple[list[int], list[float], list[float], list[float]]:
    steps = sorted({a.step for a in found})
    members = [[a for a in found if a.step == step] for step in steps]
    reward = [sum(a.success for a in row) / len(row) for row in members]
    check = [sum(a.checks["true_answer"] for a in row) / len(row) for row in members]
    return steps, reward, check, [float(len(row)) for row in members]


def step_of_fall(found: list[AttemptSummary], points: float = 0.1) -> int:
    """The first step by which the check, over five steps, has fallen so far below its best."""
    steps, _, check, _ = rates(found)
    smooth = [sum(check[i - 5 : i]) / 5 for i in range(5, len(steps) + 1)]
    return next(steps[i + 4] for i in range(len(smooth)) if max(smooth[: i + 1]) - smooth[i] >= points)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("checked", [True, False])
def test_when_the_check_metric_has_fallen_10_points_nine_in_ten_of_the_first_suspects_are_hacked(seed, checked) -> None:
    everything = attempts(hacked=True, seed=seed)
    fallen = step_of_fall(everything)
    so_far = [a for a in everything if a.step <= fallen]
    if not checked:  # the shapes alone say it, too
        so_far = [AttemptSummary(a.id, a.step, a.success, a.tools, a.tokens, a.text) for a in so_far]
    _, clusters = find_clusters(so_far)
    first = suspects(clusters)[:20]
    assert len(first) >= 10
    assert sum(WORD in suspect.attempt.text for suspect in first) >= 0.9 * len(first)


@pytest.mark.parametrize("seed", range(5))
def test_a_hacked_run_raises_the_alarm_and_a_clean_one_raises_none_and_has_no_suspects(seed) -> None:
    steps, reward, check, counts = rates(attempts(hacked=True, seed=seed))
    (alarm,) = find_alarms(steps, reward, {"true_answer": check}, counts)
    assert alarm.metric_to < alarm.metric_from
    assert alarm.reward_to > alarm.reward_from
    assert "true_answer fell" in alarm.sentence
    clean = attempts(hacked=False, seed=seed)
    steps, reward, check, counts = rates(clean)
    assert find_alarms(steps, reward, {"true_answer": check}, counts) == []
    assert suspects(find_clusters(clean)[1], has_alarm=False) == []


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


def test_the_phrase_that_spreads_is_named_and_its_cluster_comes_first_with_its_earliest_example() -> None:
    found = attempts(hacked=True, seed=0)
    steps, clusters = find_clusters(found)
    first = clusters[0]
    assert WORD in str(first.shape.phrase)
    assert first.growth > 0.1
    assert len(first.share) == len(steps) == 30
    assert first.members[0].id == min(a.id for a in first.members)
    assert all(WORD in a.text for a in first.members)
    growths = [cluster.growth for cluster in clusters]
    assert growths == sorted(growths, reverse=True)


def test_numbers_do_not_make_texts_differ() -> None:
    made = [
        AttemptSummary(i, i // 50, True, (), 10, f"it costs {i}" if i < 100 else f"paid {i} in full")
        for i in range(200)
    ]
    assert spreading_phrases(made, {0}, {3}) == ["paid 0 in full"]


def test_without_a_check_metric_learning_to_use_tools_is_not_suspected_and_leaving_them_out_is() -> None:
    def learned(first: tuple[str, ...], last: tuple[str, ...]) -> list[AttemptSummary]:
        return [AttemptSummary(i, i // 10, True, first if i < 50 else last, 10, "that costs 5") for i in range(100)]

    _, better = find_clusters(learned((), ("price",)))
    assert better[0].growth == 1.0
    assert suspects(better) == suspects(better, has_alarm=False) == []
    assert len(suspects(better, has_alarm=True)) == 50
    assert len(suspects(find_clusters(learned(("price",), ()))[1])) == 50
    assert suspects(find_clusters(learned(("price",), ("price",)))[1]) == [], "nothing grows"
    assert find_clusters([]) == ([], [])
