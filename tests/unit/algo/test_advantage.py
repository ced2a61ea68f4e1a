import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.algo.advantage import advantages, combine_measures
from palestra.core.errors import InputError, UserCodeError


def _numpy_advantages(rewards: list[float], group: list[int], scale: str, leave_one_out: bool) -> np.ndarray:
    """The formula read off the page, group by group."""
    reward, member, result = np.array(rewards), np.array(group), np.zeros(len(rewards))
    for g in set(group):
        rows = np.flatnonzero(member == g)
        if len(rows) == 1:
            continue
        for i in rows:
            others = [j for j in rows if j != i] if leave_one_out else rows
            result[i] = reward[i] - reward[others].mean()
        if scale == "group":
            result[rows] /= reward[rows].std(ddof=1) + 1e-4
        if scale == "mean":
            result[rows] /= reward[rows].mean() + 1e-4
    return result / (reward.std(ddof=1) + 1e-4) if scale == "batch" and len(reward) > 1 else result


@st.composite
def rewards_in_groups(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    size = draw(st.integers(1, 12))
    rewards = draw(st.lists(st.floats(-10, 10), min_size=size, max_size=size))
    return rewards, draw(st.lists(st.integers(-2, 3), min_size=size, max_size=size))


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@settings(max_examples=60, deadline=None)
@given(case=rewards_in_groups())
def test_advantages_equal_the_numpy_reference(scale: str, leave_one_out: bool, case: tuple) -> None:
    if scale == "mean":
        case = ([abs(reward) for reward in case[0]], case[1])
    ours = advantages(*case, scale=scale, leave_one_out=leave_one_out)
    np.testing.assert_allclose(ours.numpy(), _numpy_advantages(*case, scale, leave_one_out), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@settings(max_examples=40, deadline=None)
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 9))
def test_group_with_equal_rewards_trains_nothing(scale: str, reward: float, size: int) -> None:
    result = advantages([reward] * size + [0.0, 1.0], [0] * size + [1, 1], scale=scale)
    assert (result[:size] == 0).all()
    assert result[-1] > 0


@settings(max_examples=40, deadline=None)
@given(case=rewards_in_groups(), data=st.data())
def test_permuting_rows_permutes_advantages(case: tuple, data: st.DataObject) -> None:
    rewards, group = case
    order = data.draw(st.permutations(range(len(rewards))))
    moved = advantages([rewards[i] for i in order], [group[i] for i in order])
    torch.testing.assert_close(moved, advantages(rewards, group)[list(order)], rtol=1e-6, atol=1e-9)


def test_a_group_of_one_has_advantage_zero() -> None:
    assert advantages([3.0, 1.0, 0.0], [7, 1, 1]).tolist()[0] == 0.0
    assert advantages([3.0], [0], scale="batch").tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_row(bad: float) -> None:
    with pytest.raises(UserCodeError, match="row 2"):
        advantages([0.0, 1.0, bad], [0, 0, 0])
    if not math.isnan(bad):
        with pytest.raises(UserCodeError, match="measure 1 of row 2"):
            combine_measures([[0.0, 1.0], [1.0, 1.0], [1.0, bad]], [1.0, 1.0], [0, 0, 0])
    with pytest.raises(InputError, match="one group a row"):
        advantages([0.0, 1.0], [0])


def test_a_measure_that_has_no_say_about_a_row_is_left_out_there() -> None:
    values = [[0.0, 1.0], [1.0, math.nan], [0.0, 1.0], [1.0, math.nan]]
    both = combine_measures(values, [1.0, 0.0], [0] * 4)
    assert both.tolist() == advantages([row[0] for row in values], [0] * 4).tolist()
    second = combine_measures(values, [0.0, 1.0], [0] * 4)
    assert second.tolist() == [0.0] * 4, "the two that it looked at are equal; the others are not worse"


def test_measures_count_by_their_weights_and_not_by_their_spread() -> None:
    values = [[0.0, 0.01], [100.0, 0.0], [0.0, 0.0], [100.0, 0.01]]
    summed = advantages([a + b for a, b in values], [0] * 4)
    normalised = combine_measures(values, [1.0, 1.0], [0] * 4)
    assert abs(summed[0] - summed[2]) < 1e-3
    assert normalised[0] - normalised[2] > 1.0
    reference = sum(_numpy_advantages([v[m] for v in values], [0] * 4, "group", False) for m in range(2))
    np.testing.assert_allclose(normalised.numpy(), reference)
    weighed = combine_measures([[1.0, 0.0], [0.0, 1.0]], [2.0, 1.0], [0, 0])
    assert weighed[0] > 0 > weighed[1]


def test_over_the_mean_a_rare_success_counts_more_and_negative_rewards_are_refused() -> None:
    rare, common = advantages([1.0, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, scale="mean")[[0, 4]].tolist()
    assert (rare, common) == (pytest.approx(3.0, rel=1e-3), pytest.approx(1 / 3, rel=1e-3))
    with pytest.raises(InputError, match="negative"):
        advantages([1.0, -1.0], [0, 0], scale="mean")
