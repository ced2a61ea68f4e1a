"""Advantages of turns and of a user's function: from scores to the batch."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from builders import samples_of

from palestra.core.codec import decode, encode
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError, UserCodeError
from palestra.core.types import Group, Lineage, Problem, Rollout, Score, Turn
from palestra.rollout.rewards import RewardFunctions
from palestra.train.batch import has_signal, to_batch, trainable_batch
from palestra.train.credit import CustomObjective, states_of, turn_rewards
from palestra.train.group_source import assign_credit


def rollout(values, outcome=0.0, observations=(9, 8), states=(), **fields):
    """Two turns of the model, with an observation between them."""
    turns = (
        Turn("template", (1, 2)),
        Turn("model", (3, 4), (-0.5, -0.5)),
        Turn("environment", (observations[0],)),
        Turn("model", (5,), (-0.5,)),
    )
    scores = {"steps": Score(sum(values), None, turns=tuple(values)), "right": Score(outcome, outcome == 1.0)}
    return Rollout("p", turns, (), "answered", scores=scores, reward=sum(values) + outcome, states=states, **fields)


def train(**settings):
    return RunConfig.build({f"train.{name}": value for name, value in settings.items()}).train


def test_return_to_go_gives_each_turn_its_own_advantage_in_the_batch():
    group = Group("p", (rollout((0.0, 1.0)), rollout((1.0, 0.0))))
    credit = assign_credit([group], train(credit="return_to_go", advantage_scale="none", discount=0.5), {})
    assert turn_rewards(rollout((0.25, 0.5), outcome=1.0), {}).tolist() == [0.25, 1.5], "the last turn's"
    rows = samples_of(to_batch(credit.groups, credit.advantages, mask_truncated=True))
    mean = (0.5 + 1.0 + 1.0 + 0.0) / 4
    assert rows[0].advantages.tolist() == pytest.approx([0, 0, 0.5 - mean, 0.5 - mean, 0, 1 - mean])
    assert rows[1].advantages.tolist() == pytest.approx([0, 0, 1 - mean, 1 - mean, 0, -mean])


def test_rollouts_of_equal_reward_have_signal_if_their_turns_differ():
    group = Group("p", (rollout((0.0, 1.0)), rollout((1.0, 0.0))))
    for settings, signal in ((train(), False), (train(credit="return_to_go"), True)):
        credit = assign_credit([group], settings, {})
        assert has_signal(credit.groups[0], credit.advantages[0]) == signal
        assert trainable_batch(credit.groups, credit.advantages, settings).rows == 2 * signal


def test_gigpo_compares_turns_after_equal_observations_unless_the_environment_names_states():
    good, bad, other = rollout((0, 0), 1.0, (7,)), rollout((0, 0), 0.0, (7,)), rollout((0, 0), 0.0, (6,))
    assert states_of(good)[1] == states_of(bad)[1] != states_of(other)[1]
    settings = train(credit="gigpo", advantage_scale="none")
    credit = assign_credit([Group("p", (good, bad, other))], settings, {})
    second = [r.advantages[-1] for r in credit.groups[0].rollouts]
    assert second == pytest.approx([2 / 3 + 0.5, -1 / 3 - 0.5, -1 / 3])
    named = [rollout((0, 0), reward, (7 + i,), ("a", "b")) for i, reward in enumerate((1.0, 0.0, 0.0))]
    credit = assign_credit([Group("p", tuple(named))], settings, {})
    assert [r.advantages[-1] for r in credit.groups[0].rollouts] == pytest.approx([4 / 3, -2 / 3, -2 / 3])


def test_every_conversation_of_a_rollout_gets_the_advantages_of_its_turns():
    lineage = Lineage((Turn("template", (1,)), Turn("model", (6,), (-0.5,))), (), "answered")
    rollouts = [rollout((0, 0), reward, lineages=(lineage,)) for reward in (1.0, 0.0)]
    rollouts = [replace(r, scores={"steps": Score(0.0, None, turns=(0, 0, 0))}) for r in rollouts]
    credit = assign_credit([Group("p", tuple(rollouts))], train(credit="return_to_go", advantage_scale="none"), {})
    batch = to_batch(credit.groups, credit.advantages, mask_truncated=True)
    assert [row.advantages[-1] for row in samples_of(batch)] == pytest.approx([0.5, 0.5, -0.5, -0.5])


def test_a_measure_with_too_few_turns_is_no_verdict():
    wrong = rollout((0.5,), 1.0)
    [scored] = asyncio.run(RewardFunctions().reward(Problem("p", "?"), [wrong], [None], {})).rollouts
    assert scored.scores["steps"].error
    assert "1 values for 2 turns" in scored.error


def test_turn_values_and_states_survive_the_record():
    group = Group("p", (rollout((0.25, 0.5), states=("a", "b")),))
    again = decode(encode(group), Group).rollouts[0]
    assert again.scores["steps"].turns == (0.25, 0.5)
    assert again.states == ("a", "b")


def test_a_function_sees_rewards_turns_and_groups_and_decides_over_signal():
    seen = []

    def minus_best(batch):
        seen.append(batch)
        return batch.rewards - batch.rewards.max()

    groups = [Group("p", (rollout((0, 0), 1.0), rollout((0, 0), 1.0))), Group("q", (rollout((0.5, 0)),) * 2)]
    credit = assign_credit(groups, train(), {}, minus_best)
    assert [has_signal(*pair) for pair in zip(credit.groups, credit.advantages, strict=True)] == [False, True]
    [batch] = seen
    assert batch.rewards.tolist() == [1.0, 1.0, 0.5, 0.5]
    assert batch.turns.tolist() == [-1, -1, 0, 0, -1, 1] * 4
    assert batch.turn_rewards[:6].tolist() == [0, 0, 0, 0, 0, 1]
    assert credit.groups[1].rollouts[0].advantages.tolist() == [-0.5] * 6


def test_a_function_may_give_one_advantage_a_token():
    def later(batch):
        return np.where(batch.turns == 1, 1.0, 0.0)

    credit = assign_credit([Group("p", (rollout((0, 0)),))], train(), {}, later)
    assert credit.groups[0].rollouts[0].advantages.tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda batch: [1.0, 2.0, 3.0], r"shape \[3\] for 1 rows with 6 tokens"),
        (lambda batch: [np.nan], "nan for row 0"),
        (lambda batch: np.full(6, np.inf), "inf for token 0"),
        (lambda batch: batch.nonsense, "AttributeError"),
        (lambda batch: "one", "ValueError"),
    ],
)
def test_what_is_no_advantage_is_refused(function, words):
    with pytest.raises(UserCodeError, match=words):
        assign_credit([Group("p", (rollout((0, 0)),))], train(), {}, function)


def test_settings_name_functions_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def f(batch):\n    return batch.rewards\n\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    found = train(custom_advantages="mine.py:f")
    assert found.custom_advantages == f"{tmp_path}/mine.py:f"
    assert CustomObjective.of(found).names() == {"advantages": "f"}
    for spec, words in (("mine.py:g", "defines no 'g'"), ("mine.py:number", "function"), ("no.py:f", "no file")):
        with pytest.raises(PalestraError, match=words):
            CustomObjective.of(train(custom_loss=spec))
    with pytest.raises(SettingError, match="give one of them"):
        CustomObjective.of(found, advantages=len)


@pytest.mark.parametrize(
    "settings",
    [
        {"discount": 0.9},
        {"credit": "return_to_go", "step_weight": 2.0},
        {"credit": "return_to_go", "leave_one_out": True},
        {"credit": "return_to_go", "combine": "normalise_then_sum"},
    ],
)
def test_settings_without_effect_are_refused(settings):
    with pytest.raises(SettingError, match=r"train\."):
        train(**settings)
