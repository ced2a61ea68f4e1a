from dataclasses import replace

import pytest

from palestra.core.errors import PalestraError
from palestra.core.messages import as_messages, from_dict, to_dict
from palestra.core.types import Message, ToolCall

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


def test_content_may_be_parts_or_nothing():
    assert from_dict({"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}).text == "ab"
    assert from_dict({"role": "assistant", "content": None}).text == ""
    assert from_dict({"role": "developer", "content": "x"}).role == "system"


def test_arguments_that_are_not_json_are_recorded_on_the_call():
    plain = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}
    assert "not valid JSON" in from_dict(plain).tool_calls[0].error


@pytest.mark.parametrize("plain", [{"role": "robot", "content": ""}, {"content": "x"}], ids=str)
def test_unknown_roles_are_refused(plain):
    with pytest.raises(PalestraError, match="expected one of system"):
        from_dict(plain)


def test_images_are_refused():
    with pytest.raises(PalestraError, match="only text"):
        from_dict({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


def test_a_text_is_a_user_message():
    assert as_messages("hi") == (Message("user", "hi"),)
    assert as_messages([{"role": "user", "content": "hi"}, Message("assistant", "ho")]) == (
        Message("user", "hi"),
        Message("assistant", "ho"),
    )


def test_half_a_surrogate_pair_becomes_a_question_mark():
    half = "half \ud83d, whole 😀"
    assert [message.text for message in as_messages(half)] == ["half ?, whole 😀"]
    assert from_dict({"role": "user", "content": [{"type": "text", "text": half}]}).text == "half ?, whole 😀"


@pytest.mark.parametrize("value", [["a", "b"], {"role": "user"}, 5])
def test_what_is_no_message_is_refused_with_what_was_expected(value):
    with pytest.raises(PalestraError, match="is no message; expected a text, or dicts with `role` and `content`"):
        as_messages(value)


def test_the_format_of_a_call_is_kept():
    message = Message("assistant", "", (replace(CALL, format="json"),))
    assert from_dict(to_dict(message)) == message
    assert "format" not in to_dict(Message("assistant", "", (CALL,)))["tool_calls"][0]
