"""Groups as columns and back: our own columns, and those of an environment that knows only the protocol."""

from __future__ import annotations

import math

import numpy as np
import pytest
from written_rollouts import assert_same, rollout, through_json

from palestra.core.errors import InputError
from palestra.core.types import Group, Lineage, Message, Rollout, Turn
from palestra.extras.atropos.columns import group_from_dict, group_to_dict


def test_a_group_is_read_back_from_its_columns():
    failed = Rollout("p", (Turn("template", (1, 2, 3)),), (Message("user", "1 + 1?"),), "failed", error="no server")
    group = Group("p", (rollout(1.0), rollout(0.25, 7, stop="truncated"), failed))
    again = group_from_dict(through_json(group_to_dict(group)), "p", version=99)
    assert again.problem_id == "p"
    for ours, theirs in zip(again.rollouts, group.rollouts, strict=True):
        assert_same(ours, theirs)
        assert [t.versions.tolist() for t in ours.turns] == [t.versions.tolist() for t in theirs.turns]
        assert ours.advantages is None


def test_advantages_of_rollouts_are_read_back():
    own = [np.linspace(-1, 1, 11, dtype=np.float32), np.zeros(11, np.float32)]
    group = Group("p", tuple(rollout(0.0, advantages=row) for row in own))
    again = group_from_dict(through_json(group_to_dict(group)), "p", version=0)
    by_model = [False] * 3 + [True] * 2 + [False] * 4 + [True] * 2
    for ours, row in zip(again.rollouts, own, strict=True):
        assert ours.advantages.tolist() == np.where(by_model, row, 0).tolist()


def test_unknown_logprobs_travel_token_by_token():
    turns = (Turn("template", (1, 2)), Turn("model", (7, 8), (math.nan, -0.5)))
    columns = through_json(group_to_dict(Group("p", (rollout(turns=turns),))))
    assert columns["inference_logprobs"] == [[1.0, 1.0, 1.0, -0.5]], "the protocol's word for a missing one is 1.0"
    (again,) = group_from_dict(columns, "p", version=0).rollouts
    assert np.isnan(again.turns[1].logprobs).tolist() == [True, False]
    assert again.turns[1].logprobs[1] == -0.5


def test_other_conversations_and_notes_of_a_rollout_are_kept_in_its_groups_columns() -> None:
    helper = Lineage((Turn("template", (1,)), Turn("model", (2,), (-0.5,), 4)), (Message("user", "help"),), "answered")
    whole = rollout(1.0, lineages=(helper,), info={"exit_code": 1})
    first, second = group_from_dict(
        through_json(group_to_dict(Group("p", (whole, rollout(0.5))))), "p", version=0
    ).rollouts
    assert first.lineages[0].turns == helper.turns
    assert first.lineages[0].messages == helper.messages
    assert first.info == {"exit_code": 1}
    assert second.lineages == ()


def test_metrics_of_a_group_are_kept_in_its_columns_unless_json_cannot_write_them() -> None:
    group = Group("p", (rollout(),), {"agent/rows": 2.0, "broken": math.nan})
    assert group_from_dict(through_json(group_to_dict(group)), "p", version=0).metrics == {"agent/rows": 2.0}


# What an Atropos environment posts: no turns, versions, stops, errors, verdicts or tool results.


def columns(**changes):
    return {
        "tokens": [[1, 2, 3, 7, 8], [1, 2, 3, 9]],
        "masks": [[-100, -100, -100, 7, 8], [-100, -100, -100, 9]],
        "scores": [1.0, 0.25],
    } | changes


def test_columns_of_the_protocol_alone_are_read_by_their_masks():
    group = group_from_dict(columns(), "g", version=3)
    first, second = group.rollouts
    assert [(t.maker, t.token_ids.tolist()) for t in first.turns] == [("template", [1, 2, 3]), ("model", [7, 8])]
    assert first.turns[1].versions.tolist() == [3, 3]
    assert np.isnan(first.turns[1].logprobs).all()
    assert [(r.stop, r.error, r.tool_results, r.messages, r.advantages) for r in group.rollouts] == [
        ("answered", None, (), (), None)
    ] * 2
    assert [r.reward for r in group.rollouts] == [1.0, 0.25]
    assert (first.passed, second.passed) == (True, False)


def test_columns_given_as_null_are_as_good_as_absent_and_messages_that_cannot_be_read_are_left_out():
    absent = dict.fromkeys(("turns", "versions", "stops", "errors", "verdicts", "tool_results", "messages", "seconds"))
    ours, theirs = (group_from_dict(row, "g", version=0) for row in (columns(**absent), columns()))
    assert [r.turns for r in ours.rollouts] == [r.turns for r in theirs.rollouts]
    assert [r.scores for r in ours.rollouts] == [r.scores for r in theirs.rollouts]
    messages = [[{"role": "user", "content": "hi"}], [{"role": "judge"}]]
    group = group_from_dict(columns(messages=messages), "g", version=0)
    assert [r.messages for r in group.rollouts] == [(Message("user", "hi"),), ()]


def test_turns_that_do_not_add_up_to_the_tokens_are_refused():
    short = columns(turns=[[["template", 3], ["model", 1]], [["template", 3], ["model", 1]]])
    with pytest.raises(InputError, match="the turns of sequence 0 have 4 tokens; the sequence has 5"):
        group_from_dict(short, "g", version=0)


def test_a_sequence_that_shall_not_train_does_not_though_its_turns_are_known():
    turns = [[["template", 3], ["model", 2]], [["template", 3], ["model", 1]]]
    group = group_from_dict(columns(turns=turns, overrides=[{"set_advantage_to_zero": True}, {}]), "g", version=0)
    assert [[t.maker for t in r.turns] for r in group.rollouts] == [["template", "template"], ["template", "model"]]
    assert [r.reward for r in group.rollouts] == [1.0, 0.25], "it stays in the baseline"


def test_masks_leave_out_what_failed_and_truncated_rollouts_if_asked():
    group = Group("p", (rollout(), rollout(stop="truncated"), rollout(stop="failed", error="broken")))
    by_model = [-100, -100, -100, 5, 6, -100, -100, -100, -100, 9, 10]
    nothing = [-100] * 11
    assert group_to_dict(group)["masks"] == [by_model, by_model, nothing]
    assert group_to_dict(group, mask_truncated=True)["masks"] == [by_model, nothing, nothing]
