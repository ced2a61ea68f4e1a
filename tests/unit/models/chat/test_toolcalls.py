import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.types import ToolCall
from palestra.models.chat.callformats import FORMATS
from palestra.models.chat.callformats import parse_assistant as parse
from palestra.models.chat.toolcalls import MAY_HOLD_CALL, strip_reasoning

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADD = '{"name": "add", "arguments": {"a": 1}}'
FENCED = f"```json\n{ADD}\n```"


def parse_assistant(text: str):
    reply = parse(text)
    return reply.text, reply.calls


def call(name: str = "add", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


NASTY = "</tool_call><tool_call>{}"


@pytest.mark.parametrize(
    ("text", "message", "calls"),
    [
        ("  It is 4.\n", "It is 4.", []),
        (FENCED, FENCED, []),
        (f"First.{call(a=1)}{call('sub', b=2)} Then.", "First. Then.", [("add", {"a": 1}), ("sub", {"b": 2})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", {"a": 1})]),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        (call(a=NASTY) + call(b=1), "", [("add", {"a": NASTY}), ("add", {"b": 1})]),
    ],
    ids=["no calls", "another format", "several", "JSON text", "no arguments", "tags in an argument"],
)
def test_calls_in_the_expected_format_are_read_in_their_order(text, message, calls):
    assert parse_assistant(text) == (message, tuple(ToolCall(f"call_{i}", *each) for i, each in enumerate(calls)))


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
    assert '<tool_call>\n{"name"' in broken.error


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


def test_calls_in_thinking_are_only_talk():
    text, calls = parse_assistant(f"<think>I could {call('wrong')}</think>{call('right')}")
    assert [c.name for c in calls] == ["right"]
    assert strip_reasoning(text) == ""


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
    assert strip_reasoning(text) == expected


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


@pytest.mark.parametrize(
    ("text", "outside", "format"),
    [
        (f"<tool_call>{ADD}</tool_call>", "", ""),
        (f"I add.\n{FENCED}\nDone.", "I add.\n\nDone.", "json"),
        (f"```\n{ADD}\n```", "", "json"),
        (ADD, "", "json"),
        (f"[{ADD}]", "", "json"),
        (f"{{{ADD}}}", "", "json"),
        (f"{{{ADD}}}}}\n\nThat adds.", "That adds.", "json"),
        (f"<tool_call>\n{{{ADD}}}\n</tool_call>", "", "json"),
        (f"To add: {ADD}", "To add:", "json"),
        (f"`{ADD}`", "", "json"),
        ('{"function": "add", "arguments": {"a": 1}}', "", "json"),
        ("```tool_code\nprint(add(a=1))\n```", "", "json"),
        ("[add(a=1)]", "", "json"),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "", "qwen_xml"),
        ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "", "glm"),
        (f"[TOOL_CALLS] [{ADD}]", "", "mistral_args"),
        ("So: <|tool_call_start|>[add(a=1)]<|tool_call_end|>", "So:", "lfm"),
        ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}', "", "harmony"),
    ],
    ids=lambda value: value[:24],
)
def test_a_call_of_a_tool_is_found_in_any_format_and_names_another_than_the_models_own(text, outside, format):
    reply = parse(text, tools=TOOLS)
    assert (reply.text, reply.calls) == (outside, (ToolCall("call_0", "add", {"a": 1}, format=format),))


@pytest.mark.parametrize(
    "text",
    [
        '```json\n{"name": "other", "arguments": {}}\n```',
        '```json\n{"answer": 4}\n```',
        '{"name": "Ann", "arguments": {"a": 1}}',
        "```python\nadd(a=1)\n```",
        f"The call is {ADD}, as you see.",
        f"<think>I could write\n{FENCED}",
    ],
)
def test_what_names_no_tool_or_is_no_call_by_itself_stays_text(text):
    assert parse(text, tools=TOOLS).calls == ()


def test_a_call_of_a_tool_that_is_not_valid_json_is_an_error_for_the_model():
    (call,) = parse('To add:\n{"name": "add", "arguments": {"a": 1 + 2}}', tools=TOOLS).calls
    assert (call.name, call.format) == ("add", "json")
    assert call.error.startswith("the tool call is not valid JSON")


def test_an_unexpected_format_can_be_answered_with_the_expected_one():
    (call,) = parse(FENCED, tools=TOOLS, unexpected="error").calls
    assert call.error is not None
    assert call.error.endswith(f"<tool_call>\n{ADD}\n</tool_call>")
    assert (call.name, call.arguments, call.format) == ("add", {"a": 1}, "json")


def test_every_text_that_begins_a_call_is_looked_at_for_calls_in_other_formats():
    texts = [text for each in FORMATS for text in (*each.opens, *each.at_start, each.example)]
    assert all(MAY_HOLD_CALL.search(text) for text in texts)
