"""Groups from the wire as samples of the learner: masks, prompts, advantages, logprobs."""

import math

import pytest
from builders import samples_of

from palestra.core.errors import InputError
from palestra.core.types import Group, Message, Rollout, ToolCall, Turn
from palestra.extras.atropos.protocol import ModelLimits, read_group, write_group
from palestra.train.batch import to_batch

LIMITS = ModelLimits(vocabulary=100, context_tokens=16)


def posted(**changes):
    return {
        "tokens": [[1, 2, 3, 7, 8], [1, 2, 4, 9]],
        "masks": [[-100, -100, -100, 7, 8], [-100, -100, -100, 9]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.25], [1.0, 1.0, 1.0, -0.75]],
    } | changes


def samples(group, advantages):
    return samples_of(to_batch([group], [advantages], mask_truncated=True))


def test_tokens_masks_and_logprobs_come_through():
    group = read_group(posted(), "g", LIMITS, 4)
    first, second = samples(group, [1.0, -1.0])
    assert [r.advantages for r in group.rollouts] == [None, None]
    assert first.token_ids.tolist() == [1, 2, 3, 7, 8]
    assert first.policy_mask.tolist() == [False, False, False, True, True]
    assert first.logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.25]
    assert second.policy_mask.tolist() == [False, False, False, True]
    assert group.rewards == [1.0, 0.0]
    assert first.versions[first.policy_mask].tolist() == [4, 4]


def test_prompt_is_shared_only_as_far_as_siblings_agree():
    group = read_group(posted(), "g", LIMITS, 0)
    assert [s.prompt_length for s in samples(group, [0.0, 0.0])] == [2, 2]
    same = posted(tokens=[[1, 2, 3, 7, 8], [1, 2, 3, 9]])
    group = read_group(same, "g", LIMITS, 0)
    assert [s.prompt_length for s in samples(group, [0.0, 0.0])] == [3, 3]


@pytest.mark.parametrize(
    ("changes", "masks"),
    [
        ({"masks": [[1, 2, 3, 7, 8], [1, 2, 4, 9]]}, [[0, 1, 1, 1, 1], [0, 1, 1, 1]]),
        ({"masks": [[-100, 2, -100, 7, -100], [-100] * 4]}, [[0, 1, 0, 1, 0], [0, 0, 0, 0]]),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, [[0, 0, 0, 0, 0], [0, 0, 0, 1]]),
    ],
    ids=["never the first token", "several turns", "override"],
)
def test_which_tokens_train(changes, masks):
    group = read_group(posted(inference_logprobs=None, **changes), "g", LIMITS, 0)
    rows = samples(group, [1.0, -1.0])
    assert [row.policy_mask.tolist() for row in rows] == [list(map(bool, mask)) for mask in masks]
    assert all(math.isnan(value) for row in rows for value in row.logprobs[row.policy_mask])
    assert group.rewards == [1.0, 0.0], "all stay in the baseline"


def test_advantages_that_were_posted_are_kept_and_train_their_own_tokens():
    group = read_group(posted(advantages=[[9.0, 0.0, 0.0, 2.0, -1.0], [0.0, 0.0, 0.0, 3.0]]), "g", LIMITS, 0)
    rows = samples(group, [7.0, 7.0])
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 7, 8], [1, 2, 4, 9]]
    assert [row.advantages.tolist() for row in rows] == [[0.0, 0.0, 0.0, 2.0, -1.0], [0.0, 0.0, 0.0, 3.0]]
    assert [row.policy_mask[3:].tolist() for row in rows] == [[True, True], [True]]


def test_what_the_model_cannot_take_is_refused():
    with pytest.raises(InputError, match="vocabulary"):
        read_group(posted(), "g", ModelLimits(vocabulary=9, context_tokens=16), 0)
    turn = {"maker": "model", "token_ids": [100], "logprobs": [-0.5], "versions": [0], "finish": "stop"}
    lineages = [[{"turns": [turn], "messages": [], "stop": "answered"}], []]
    with pytest.raises(InputError, match="token id 100 is outside of the vocabulary"):
        read_group(posted(lineages=lineages), "g", LIMITS, 0)
    with pytest.raises(InputError, match="holds 4"):
        read_group(posted(), "g", ModelLimits(vocabulary=100, context_tokens=4), 0)


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
    again = read_group(write_group(group, 0, mask_truncated=True), "p", LIMITS, 4)
    assert [r.advantages for r in again.rollouts] == [None] * 3
    assert again.rewards == group.rewards
    assert [r.messages for r in again.rollouts] == [r.messages for r in group.rollouts]
    advantages = [1.0, -0.5, -0.5]
    assert samples(again, advantages) == samples(group, advantages)


def test_a_failed_attempt_trains_nothing_and_leaves_the_baseline():
    failed = Rollout("p", (Turn("template", (1, 2, 3)),), (), "failed", error="the tool broke")
    columns = write_group(Group("p", (attempt(1.0, 5), failed, attempt(0.5, 7))), 3, mask_truncated=True)
    assert columns["scores"] == [1.0, 0.75, 0.5]
    assert columns["masks"][1] == [-100, -100, -100]
    assert columns["env_id"] == 3
    group = read_group(columns, "p", LIMITS, 4)
    assert [bool(s.policy_mask.any()) for s in samples(group, [1.0, 0.0, -1.0])] == [True, True]
    assert [r.error for r in group.rollouts] == [None, "the tool broke", None]
    del columns["errors"]  # as a trainer sees it that does not know our columns
    del columns["turns"]
    group = read_group(columns, "p", LIMITS, 4)
    assert [bool(s.policy_mask.any()) for s in samples(group, [1.0, 0.0, -1.0])] == [True, False, True]
