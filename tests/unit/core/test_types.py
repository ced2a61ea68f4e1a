"""Types and weights."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from palestra.core.errors import InputError
from palestra.core.messages import as_messages, from_dict, to_dict
from palestra.core.types import Group, Message, Rollout, Sample, Score, ToolCall, Turn
from palestra.core.weights import Weights

MASK = (False, True, True)


def sample(**changes) -> Sample:
    fields = {"token_ids": (1, 2, 3), "policy_mask": MASK, "echo_mask": (False,) * 3, "logprobs": (0.0, -0.5, -1.0)}
    return Sample(**({**fields, "advantages": 1.0} | changes))


def test_a_turn_holds_arrays_whatever_it_was_given():
    turn = Turn("model", (7, 8), [-0.5, -1.0], 3)
    assert [a.dtype for a in (turn.token_ids, turn.logprobs, turn.versions)] == [np.int32, np.float32, np.int32]
    assert turn.versions.tolist() == [3, 3]
    assert Turn("model", [7, 8], (-0.5, -1.0), [3, 4]).versions.tolist() == [3, 4]
    assert len(Turn("template", (1, 2)).versions) == len(Turn("environment", (1, 2)).logprobs) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model", (7, 8), (-0.5,)), "a model turn of 2 tokens has 1 logprobs; expected 2"),
        (("model", (7, 8)), "has 0 logprobs; expected 2"),
        (("template", (7, 8), (-0.5, -0.5)), "a template turn of 2 tokens has 2 logprobs; expected 0"),
        (("model", (7, 8), (-0.5, -0.5), (1, 2, 3)), "has 3 versions; expected 2"),
        (("environment", (7, 8), (), (1, 2)), "has 2 versions; expected 0"),
    ],
)
def test_arrays_of_other_lengths_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Turn(*arguments)


def test_arrays_cannot_be_changed_and_the_callers_stay_as_they_are():
    ids = np.array([7, 8], np.int32)
    turn = Turn("template", ids)
    with pytest.raises(ValueError, match="read-only"):
        turn.token_ids[0] = 9
    ids[0] = 7  # the caller's is not locked
    with pytest.raises(ValueError, match="read-only"):
        sample().advantages[0] = 2.0


def test_turns_are_equal_by_their_numbers_and_nan_equals_nan():
    assert Turn("model", (7,), (math.nan,)) == Turn("model", [7], [math.nan])
    assert Turn("model", (7,), (-0.5,)) != Turn("model", (7,), (-0.25,))
    assert Turn("model", (7,), (-0.5,), 1) != Turn("model", (7,), (-0.5,), 2)
    assert Turn("template", (7,)) != Turn("environment", (7,))
    assert sample() == sample(token_ids=[1, 2, 3])
    assert sample() != sample(advantages=0.5)


def test_one_number_stands_for_every_token_of_a_sample():
    one = sample(advantages=2.0, versions=5)
    assert one.advantages.tolist() == [2.0] * 3
    assert one.versions.tolist() == [5] * 3
    own = sample(advantages=[0.0, 1.0, -1.0], versions=[0, 1, 2])
    assert (own.advantages.tolist(), own.versions.tolist()) == ([0.0, 1.0, -1.0], [0, 1, 2])
    assert [getattr(own, n).dtype for n in ("policy_mask", "echo_mask", "advantages")] == [bool, bool, np.float32]


@pytest.mark.parametrize("name", ["policy_mask", "echo_mask", "logprobs", "advantages", "versions"])
def test_a_sample_whose_arrays_have_other_lengths_is_refused(name):
    with pytest.raises(ValueError, match=f"sample of 3 tokens have other lengths: .*'{name}': 2"):
        sample(**{name: [1, 0]})


def test_a_rollout_counts_the_models_tokens_and_passes_when_every_measure_does():
    turns = (Turn("template", (1, 2)), Turn("model", (3, 4), (0.0, 0.0)), Turn("environment", (5,)))
    rollout = Rollout("p", turns, (), "answered", scores={"a": Score(1.0, True), "b": Score(0.0, False)}, reward=0.5)
    assert rollout.sampled_tokens == 2
    assert not rollout.passed
    assert not Rollout("p", turns, (), "answered").passed, "nothing was measured"
    assert Group("p", (rollout, rollout)).rewards == [0.5, 0.5]


def test_the_repr_of_a_rollout_stays_short_whatever_its_length():
    turn = Turn("model", range(5000), logprobs=[-0.5] * 5000, versions=1, finish="stop")
    rollout = Rollout("p1", (turn,), (Message("user", "x" * 5000),), stop="answered", reward=0.5)
    assert len(repr([turn, rollout])) < 250
    assert "5000 sampled tokens" in repr(rollout)


def tensors() -> dict[str, torch.Tensor]:
    layer = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {"a.weight": layer.T, "b.weight": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}


def test_saved_weights_are_read_back_with_their_version(tmp_path):
    path = Weights(7, tensors).save(tmp_path / "weights.safetensors")
    again = Weights.load(path)
    assert again.version == 7
    assert again.tensors().keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(again.tensors()[name], tensor)
        assert again.tensors()[name].dtype == tensor.dtype


def test_a_write_that_fails_leaves_the_older_file_whole(tmp_path, monkeypatch):
    path = Weights(1, tensors).save(tmp_path / "weights.safetensors")

    def fail(tensors, to, metadata) -> None:
        to.write_bytes(b"half of it")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(OSError, match="full"):
            Weights(2, tensors).save(path)
    assert Weights.load(path).version == 1
    assert Weights(3, tensors).save(path) == path
    assert Weights.load(path).version == 3
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


CALL = ToolCall("call_0", "add", {"a": 1, "s": "ü"})


@pytest.mark.parametrize("arguments_as_text", [False, True])
@pytest.mark.parametrize(
    "message",
    [
        Message("system", "Be brief."),
        Message("user", "2 + 2?"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "4", tool_call_id="call_0", name="add"),
    ],
    ids=lambda m: m.role,
)
def test_messages_survive_the_way_to_a_dict_and_back(message, arguments_as_text):
    assert from_dict(to_dict(message, arguments_as_text=arguments_as_text)) == message


def test_templates_get_arguments_as_an_object_and_servers_as_text():
    message = Message("assistant", "", tool_calls=(CALL,))
    assert to_dict(message)["tool_calls"][0]["function"]["arguments"] == {"a": 1, "s": "ü"}
    as_text = to_dict(message, arguments_as_text=True)["tool_calls"][0]["function"]["arguments"]
    assert as_text == '{"a": 1, "s": "ü"}'


def test_messages_are_read_from_parts_texts_and_dicts():
    assert from_dict({"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}).text == "ab"
    assert from_dict({"role": "assistant", "content": None}).text == ""
    assert from_dict({"role": "developer", "content": "x"}).role == "system"
    plain = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}
    assert "not valid JSON" in from_dict(plain).tool_calls[0].error
    hi, ho = Message("user", "hi"), Message("assistant", "ho")
    assert as_messages("hi") == (hi,)
    assert as_messages([{"role": "user", "content": "hi"}, ho]) == (hi, ho)


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([{"role": "robot", "content": ""}], "expected one of system"),
        ([{"content": "x"}], "expected one of system"),
        ([IMAGE], "only text"),
        (["a", "b"], "is no message; expected a text, or dicts with `role` and `content`"),
        ({"role": "user"}, "is no message"),
        (5, "is no message"),
    ],
    ids=str,
)
def test_what_is_no_message_is_refused_with_what_was_expected(value, words):
    with pytest.raises(InputError, match=words):
        as_messages(value)


def test_the_format_of_a_call_is_kept():
    message = Message("assistant", "", (replace(CALL, format="json"),))
    assert from_dict(to_dict(message)) == message
    assert "format" not in to_dict(Message("assistant", "", (CALL,)))["tool_calls"][0]
