"""Credit for turns, compared with plain NumPy."""

import numpy as np
import pytest

from palestra.algo.advantage import advantages, gigpo_advantages, return_advantages, returns_to_go

EPS = 1e-4


def reference_returns(rewards, discount):
    return np.array(
        [sum(discount ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]
    )


def reference_advantages(values, scale="group"):
    """Of one group: minus its mean, over its standard deviation, or its mean (MaxRL)."""
    values = np.asarray(values, float)
    divisor = {"group": values.std(ddof=1) if len(values) > 1 else 0.0, "mean": values.mean(), "none": 1.0 - EPS}[scale]
    return (values - values.mean()) / (divisor + EPS)


def random_rollouts(seed=0, groups=3, siblings=5):
    rng = np.random.default_rng(seed)
    group = [g for g in range(groups) for _ in range(siblings)]
    rewards = [rng.random(rng.integers(1, 7)) for _ in group]
    states = [[f"room {rng.integers(3)}" for _ in row] for row in rewards]
    return rng.random(len(group)), rewards, states, group


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.95, 1.0])
def test_returns_to_go_equal_the_sum_over_later_turns(discount):
    rewards = np.random.default_rng(2).random(9)
    assert np.abs(returns_to_go(rewards, discount) - reference_returns(rewards, discount)).max() < 1e-6


@pytest.mark.parametrize("scale", ["group", "mean", "none"])
def test_return_advantages_compare_all_turns_of_a_group(scale):
    _, rewards, _, group = random_rollouts()
    ours = return_advantages(rewards, group, discount=0.9, scale=scale)
    for g in set(group):
        own = [i for i, number in enumerate(group) if number == g]
        theirs = reference_advantages(np.concatenate([reference_returns(rewards[i], 0.9) for i in own]), scale)
        assert np.abs(np.concatenate([ours[i] for i in own]) - theirs).max() < 1e-6


def test_with_an_outcome_alone_and_equally_many_turns_every_turn_has_the_advantage_of_its_rollout():
    outcomes, group = [1.0, 0.0, 0.0, 1.0, 1.0], [0] * 5
    ours = return_advantages([np.array([0.0, 0.0, reward]) for reward in outcomes], group, discount=1.0, scale="none")
    assert np.abs(np.array(ours) - advantages(outcomes, group, scale="none").numpy()[:, None]).max() < 1e-12


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_equals_numpy(scale):
    episode, rewards, states, group = random_rollouts()
    ours = gigpo_advantages(episode, rewards, states, group, discount=0.95, step_weight=0.7, scale=scale)
    returns = [reference_returns(row, 0.95) for row in rewards]
    for i, row in enumerate(rewards):
        for k in range(len(row)):
            same = [
                (j, m)
                for j in range(len(rewards))
                for m in range(len(rewards[j]))
                if group[j] == group[i] and states[j][m] == states[i][k]
            ]
            step = reference_advantages([returns[j][m] for j, m in same], scale)[same.index((i, k))]
            assert abs(ours[i][k] - (episode[i] + 0.7 * step)) < 1e-6


def test_a_state_that_was_met_once_leaves_the_advantage_of_the_rollout():
    rewards = [np.array([0.0, 1.0]), np.array([0.0, 0.0])]
    ours = gigpo_advantages([0.5, -0.5], rewards, [["start", "a"], ["start", "b"]], [0, 0], discount=1.0)
    assert [row[1] for row in ours] == [0.5, -0.5]
    assert ours[0][0] > 0.5
    assert ours[1][0] < -0.5
