"""Groups from the wire as rollouts: masks, prompts, advantages, logprobs."""

from __future__ import annotations

import math

import pytest

from palestra.core.errors import PalestraError
from palestra.core.types import Group, Message, Rollout, ToolCall, Turn
from palestra.train.samples import to_samples
from palestra.wire.groups import Limits, read_group, write_group

LIMITS = Limits(vocabulary=100, context_tokens=16)


def plain(**changes):
    return {
        "tokens": [[1, 2, 3, 7, 8], [1, 2, 4, 9]],
        "masks": [[-100, -100, -100, 7, 8], [-100, -100, -100, 9]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.25], [1.0, 1.0, 1.0, -0.75]],
    } | changes


def samples(group, advantages):
    return to_samples([group], [advantages], True)


def test_tokens_masks_and_logprobs_come_through():
    group, given = read_group(plain(), "g", LIMITS, 4)
    first, second = samples(group, [1.0, -1.0])
    assert given is None
    assert first.token_ids == (1, 2, 3, 7, 8)
    assert first.trained == (False, False, False, True, True)
    assert first.logprobs == (0.0, 0.0, 0.0, -0.5, -0.25)
    assert second.trained == (False, False, False, True)
    assert group.rewards == [1.0, 0.0]
    assert first.policy_version == 4


def test_prompt_is_shared_only_as_far_as_siblings_agree():
    group, _ = read_group(plain(), "g", LIMITS, 0)
    assert [s.prompt_length for s in samples(group, [0.0, 0.0])] == [2, 2]
    same = plain(tokens=[[1, 2, 3, 7, 8], [1, 2, 3, 9]])
    group, _ = read_group(same, "g", LIMITS, 0)
    assert [s.prompt_length for s in samples(group, [0.0, 0.0])] == [3, 3]


def test_several_turns_are_trained_and_what_lies_between_is_not():
    turns = plain(
        tokens=[[1, 7, 2, 8]], masks=[[-100, 7, -100, 8]], scores=[1.0], inference_logprobs=[[1.0, -0.5, 1.0, -0.1]]
    )
    group, _ = read_group(turns, "g", LIMITS, 0)
    (sample,) = samples(group, [1.0])
    assert sample.trained == (False, True, False, True)


def test_first_token_is_never_trained():
    whole = plain(masks=[[1, 2, 3, 7, 8], [1, 2, 4, 9]], inference_logprobs=[])
    group, _ = read_group(whole, "g", LIMITS, 0)
    assert [s.trained[0] for s in samples(group, [0.0, 0.0])] == [False, False]


@pytest.mark.parametrize("logprobs", [None, [], [[1.0] * 5, [1.0] * 4]])
def test_missing_logprobs_are_nan_for_the_learner_to_compute(logprobs):
    group, _ = read_group(plain(inference_logprobs=logprobs), "g", LIMITS, 0)
    first, _ = samples(group, [1.0, 0.0])
    assert all(math.isnan(value) for value, trained in zip(first.logprobs, first.trained, strict=True) if trained)


def test_given_advantages_are_kept_and_different_ones_train_their_own_tokens():
    group, given = read_group(plain(advantages=[[0.0, 0.0, 0.0, 2.0, -1.0], [0.0, 0.0, 0.0, 3.0]]), "g", LIMITS, 0)
    assert given == [-1.0, 2.0, 3.0]
    rows = samples(group, given)
    assert [row.token_ids for row in rows[:2]] == [(1, 2, 3, 7, 8)] * 2
    assert [row.trained[3:] for row in rows] == [(False, True), (True, False), (True,)]


def test_override_silences_one_sequence_and_leaves_it_in_the_baseline():
    group, _ = read_group(plain(overrides=[{"set_advantage_to_zero": True}, {}]), "g", LIMITS, 0)
    first, second = samples(group, [1.0, -1.0])
    assert not any(first.trained)
    assert any(second.trained)


def test_what_the_model_cannot_take_is_refused():
    with pytest.raises(PalestraError, match="vocabulary"):
        read_group(plain(), "g", Limits(vocabulary=9, context_tokens=16), 0)
    with pytest.raises(PalestraError, match="holds 4"):
        read_group(plain(), "g", Limits(vocabulary=100, context_tokens=4), 0)


def attempt(reward: float, *ids: int, **more) -> Rollout:
    """A call, a tool's result of three tokens, and an answer."""
    turns = (
        Turn("template", (1, 2, 3)),
        Turn("model", ids, tuple(-0.1 * i for i in ids), 4),
        Turn("environment", (20, 21, 22)),
        Turn("model", (9,), (0.0,), 4),
    )
    call = Message("assistant", "", (ToolCall("c", "add", {"a": 1}),))
    messages = (Message("user", "1 + 1?"), call, Message("tool", "2", tool_call_id="c", name="add"))
    return Rollout("p", turns, messages, **({"stop": "answered", "reward": reward} | more))


def test_a_group_that_is_written_and_read_trains_the_same():
    group = Group("p", (attempt(1.0, 5, 6), attempt(0.25, 7), attempt(0.0, 8, 4, 5, stop="truncated")))
    again, given = read_group(write_group(group, 0, mask_truncated=True), "p", LIMITS, 4)
    assert given is None
    assert again.rewards == group.rewards
    assert [r.messages for r in again.rollouts] == [r.messages for r in group.rollouts]
    advantages = [1.0, -0.5, -0.5]
    for ours, theirs in zip(samples(group, advantages), samples(again, advantages), strict=True):
        assert (ours.token_ids, ours.trained, ours.prompt_length) == (
            theirs.token_ids,
            theirs.trained,
            theirs.prompt_length,
        )
        trained = [i for i, counts in enumerate(ours.trained) if counts]
        assert [ours.logprobs[i] for i in trained] == [theirs.logprobs[i] for i in trained]


def test_truncated_attempts_train_where_the_settings_say_so():
    group = Group("p", (attempt(1.0, 5), attempt(0.0, 7, stop="truncated")))
    assert write_group(group, 0, mask_truncated=False)["masks"][1] == [-100, -100, -100, 7, -100, -100, -100, 9]
    assert set(write_group(group, 0, mask_truncated=True)["masks"][1]) == {-100}


def test_a_failed_attempt_trains_nothing_and_leaves_the_baseline():
    failed = Rollout("p", (Turn("template", (1, 2, 3)),), (), "failed", error="the tool broke")
    plain = write_group(Group("p", (attempt(1.0, 5), failed, attempt(0.5, 7))), 3, mask_truncated=True)
    assert plain["scores"] == [1.0, 0.75, 0.5]
    assert plain["masks"][1] == [-100, -100, -100]
    assert plain["env_id"] == 3
    group, _ = read_group(plain, "p", LIMITS, 4)
    assert [any(sample.trained) for sample in samples(group, [1.0, 0.0, -1.0])] == [True, False, True]
