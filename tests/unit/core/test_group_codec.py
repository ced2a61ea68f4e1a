"""Rollouts as JSON and back, and the columns of a group."""

from __future__ import annotations

import math

import numpy as np
import pytest
from written_rollouts import assert_same, rollout, through_json

from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Lineage, Message, Rollout, Turn


def test_a_rollout_is_read_back_from_its_line():
    whole = rollout()
    again = rollout_from_dict(through_json(rollout_to_dict(whole)))
    assert_same(again, whole, logprobs=5e-5)
    assert [t.versions.tolist() for t in again.turns] == [[], [4, 4], [], [], [4, 4]], "a turn's oldest"
    failed = Rollout("p", (), (Message("user", "hi"),), "failed", error="the prompt is too long")
    assert_same(rollout_from_dict(through_json(rollout_to_dict(failed))), failed)


def test_unknown_logprobs_on_disk_are_null_and_come_back_unknown():
    turns = (Turn("template", (1, 2)), Turn("model", (7, 8), (math.nan, -0.5)))
    line = through_json(rollout_to_dict(rollout(turns=turns)))
    assert line["turns"][1]["logprobs"] == [None, -0.5]
    again = rollout_from_dict(line).turns[1].logprobs
    assert np.isnan(again[0])
    assert again[1] == -0.5


def test_a_line_of_version_01_is_read():
    line = {
        "step": 3, "problem_id": "p", "reward": 1.0, "passed": True, "stop": "answered", "error": None,
        "scores": {"right": {"value": 1.0, "passed": True, "reason": "", "error": False}},
        "messages": [{"role": "user", "text": "hi", "tool_call_id": None, "name": None, "tool_calls": []}],
        "turns": [
            {"maker": "template", "token_ids": [1, 2], "policy_version": 0},
            {"maker": "model", "token_ids": [7, 8], "policy_version": 6},
        ],
        "seconds": 0.5, "tool_seconds": 0.0,
    }  # fmt: skip
    old = rollout_from_dict(line)
    assert old.turns[1].versions.tolist() == [6, 6]
    assert np.isnan(old.turns[1].logprobs).all()
    assert old.passed
    assert old.tool_results == ()


def test_other_conversations_and_notes_of_a_rollout_are_kept_in_its_line() -> None:
    helper = Lineage((Turn("template", (1,)), Turn("model", (2,), (-0.5,), 4)), (Message("user", "help"),), "answered")
    again = rollout_from_dict(through_json(rollout_to_dict(rollout(1.0, lineages=(helper,), info={"exit_code": 1}))))
    assert again.lineages[0].turns == helper.turns
    assert again.lineages[0].messages == helper.messages
    assert again.info == {"exit_code": 1}
    assert "lineages" not in rollout_to_dict(rollout())


def test_null_stands_for_a_default_and_unknown_keys_are_ignored() -> None:
    line = through_json(rollout_to_dict(rollout())) | {"info": None, "stop": None, "of_a_later_version": 1}
    assert rollout_from_dict(line | {"stop": "tool_limit"}).info == {}
    del line["stop"]
    assert rollout_from_dict(line).stop == "answered"


@pytest.mark.parametrize("name", ["problem_id", "reward", "scores", "messages", "turns"])
def test_a_damaged_line_is_no_rollout(name: str) -> None:
    line = through_json(rollout_to_dict(rollout()))
    del line[name]
    with pytest.raises(KeyError, match=name):
        rollout_from_dict(line)
