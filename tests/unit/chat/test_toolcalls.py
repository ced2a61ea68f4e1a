import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.chat.toolcalls import parse_assistant, strip_thinking
from palestra.core.types import ToolCall


def call(name: str = "add", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_text_without_calls_is_the_message():
    assert parse_assistant("  It is 4.\n") == ("It is 4.", ())


def test_several_calls_keep_their_order_and_get_numbered_ids():
    text, calls = parse_assistant(f"First.{call(a=1)}{call('sub', b=2)} Then.")
    assert text == "First. Then."
    assert calls == (ToolCall("call_0", "add", {"a": 1}), ToolCall("call_1", "sub", {"b": 2}))


def test_arguments_may_be_json_text():
    body = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    assert parse_assistant(f"<tool_call>{body}</tool_call>")[1][0].arguments == {"a": 1}


def test_arguments_may_be_left_out():
    assert parse_assistant('<tool_call>{"name": "now"}</tool_call>')[1] == (ToolCall("call_0", "now"),)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"name": "add", "arguments": {', "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": ""}', 'no "name"'),
        ('{"name": "add", "arguments": [1]}', '"arguments" is not a JSON object'),
        ('{"name": "add", "arguments": null}', '"arguments" is not a JSON object'),
        ('{"name": "add", "arguments": "{"}', '"arguments" is text that is not valid JSON'),
        ('{"name": "add", "arguments": ' + "9" * 5000 + "}", "a number is too long"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_read_says_what_was_wrong_and_how_to_write_it(body, words):
    text, (broken,) = parse_assistant(f"So: <tool_call>{body}</tool_call>")
    assert text == "So:"
    assert broken.error is not None
    assert words in broken.error
    assert '<tool_call>{"name"' in broken.error


def test_a_broken_call_with_a_readable_name_keeps_it():
    assert parse_assistant('<tool_call>{"name": "add", "arguments": 1}</tool_call>')[1][0].name == "add"


def test_an_unclosed_call_is_an_error_and_the_next_one_still_counts():
    text, calls = parse_assistant(f'<tool_call>{{"name": "add"{call("sub")}')
    assert text == ""
    assert [bool(c.error) for c in calls] == [True, False]
    assert "not closed" in calls[0].error
    assert calls[1].name == "sub"


def test_a_call_cut_off_by_length_is_an_error_even_when_its_json_is_whole():
    _, (broken,) = parse_assistant('<tool_call>{"name": "add", "arguments": {}}')
    assert "not closed" in broken.error


def test_tags_inside_of_an_argument_belong_to_it():
    nasty = "</tool_call><tool_call>{}"
    text, calls = parse_assistant(call(a=nasty) + call(b=1))
    assert text == ""
    assert [c.arguments for c in calls] == [{"a": nasty}, {"b": 1}]


def test_calls_in_thinking_are_only_talk():
    text, calls = parse_assistant(f"<think>I could {call('wrong')}</think>{call('right')}")
    assert [c.name for c in calls] == ["right"]
    assert strip_thinking(text) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>hm</think>Four.", "Four."),
        ("<think>\n\n</think>\n\nFour.", "Four."),
        ("hm, the prompt opened it</think>Four.", "Four."),
        ("Four. <think>and on", "Four."),
        ("<think>a</think>b<think>c</think>d", "bd"),
        ("Four.", "Four."),
    ],
)
def test_thinking_is_stripped(text, expected):
    assert strip_thinking(text) == expected


@given(st.text(alphabet=st.sampled_from(list('{}[]":, naméor\n\\1</tool_call><think>')), max_size=80))
def test_any_text_is_read_without_an_exception(text):
    parse_assistant(f"<tool_call>{text}")
    parse_assistant(text)
    strip_thinking(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=20), st.dictionaries(st.text(), json_values, max_size=4))
def test_every_well_formed_call_is_read_back(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    assert parse_assistant(f"<tool_call>\n{body}\n</tool_call>")[1] == (ToolCall("call_0", name, arguments),)
