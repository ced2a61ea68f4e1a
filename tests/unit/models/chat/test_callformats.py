"""Tool calls as each family of models writes them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.types import ToolCall
from palestra.models.chat.callformats import FORMATS, HERMES, JSON, LLAMA, MISTRAL, format_of, parse_assistant
from palestra.models.chat.calls_tagged import typed

ADD = ToolCall("call_0", "add", {"a": 1, "b": "x"})
SUB = ToolCall("call_1", "sub", {"c": [1, {"d": None}]})
ADD_JSON, SUB_JSON = '{"name": "add", "%s": {"a": 1, "b": "x"}}', '{"name": "sub", "%s": {"c": [1, {"d": null}]}}'
ADD_P, SUB_P = ADD_JSON % "parameters", SUB_JSON % "parameters"
ADD_A, SUB_A = ADD_JSON % "arguments", SUB_JSON % "arguments"
GEMMA = next(form for form in FORMATS if form.name == "gemma4")
PYTHON = '[add(a=1, b="x"), sub(c=[1, {"d": null}])]'


@pytest.mark.parametrize(
    ("form", "text", "outside", "calls"),
    [
        (LLAMA, ADD_P, "", (ADD,)),
        (LLAMA, f"<|python_tag|>{ADD_P}", "", (ADD,)),
        (LLAMA, f"Let me see.<|python_tag|>{ADD_P}; {SUB_P}", "Let me see.", (ADD, SUB)),
        (LLAMA, f"{ADD_P};\n{SUB_A}", "", (ADD, SUB)),
        (LLAMA, f'{{"type": "function", "function": {ADD_P}}}', "", (ADD,)),
        (LLAMA, PYTHON, "", (ADD, SUB)),
        (LLAMA, '<|python_tag|>add(a=1, b="x")', "", (ADD,)),
        (MISTRAL, f"[TOOL_CALLS] [{ADD_A}, {SUB_A}]", "", (ADD, SUB)),
        (MISTRAL, f"One moment.[TOOL_CALLS][{ADD_A}]", "One moment.", (ADD,)),
        (MISTRAL, f"[TOOL_CALLS]{ADD_A}", "", (ADD,)),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]sub{"c": [1, {"d": null}]}', "", (ADD, SUB)),
        (JSON, ADD_P, "", (ADD,)),
        (JSON, f"[{ADD_A}, {SUB_P}]", "", (ADD, SUB)),
        (JSON, PYTHON, "", (ADD, SUB)),
        (JSON, f"I look it up:\n```json\n{ADD_P}\n```", "I look it up:", (ADD,)),
        (JSON, f"```json\n{ADD_P}\n```\n```json\n{SUB_P}\n```", "", (ADD, SUB)),
        (JSON, '```tool_code\nadd(a=1, b="x")\nprint(sub(c=[1, {"d": None}]))\n```', "", (ADD, SUB)),
        (JSON, f"```tool_call\n{ADD_A}", "", (ADD,)),
    ],
)
def test_each_family_is_read_in_its_own_forms(form, text, outside, calls):
    reply = parse_assistant(text, form)
    assert (reply.text, reply.calls) == (outside, calls)


HALVES = [
    ("add", {"a": "\ud83d lamp"}),
    ("add", {"\ude00": "x"}),
    ("add\ud83d", {"a": "x"}),
    ("add", {"a": {"\ud83d": ["\ude00\ud83d"]}}),
]
ADD_SCHEMA = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": ["string", "object"]}}},
}


@pytest.mark.parametrize("own", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("call", HALVES)
def test_half_an_emoji_in_a_call_is_replaced_in_every_format(own, call):
    text = own.write([call]).replace("\ud83d", "\\ud83d").replace("\ude00", "\\ude00")  # as a model writes it
    for form in {own.name: own, "hermes": HERMES, "json": JSON}.values():
        for found in parse_assistant(text, form, [ADD_SCHEMA]).calls:
            assert json.dumps([found.id, found.name, found.arguments, found.error], ensure_ascii=False).encode()


@pytest.mark.parametrize("depth", [150, 400, 900])
def test_deep_arguments_are_an_error_for_the_model_to_read(depth):
    value = "[" * depth + "]" * depth
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    (call,) = parse_assistant(text, HERMES).calls
    assert (call.name, call.arguments) == ("add", {})
    assert "nested too deeply" in call.error


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, JSON])
@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        '{"answer": 4}',
        '{"name": "Ann", "age": 3}',
        "[1, 2]",
        "[see below](http://x)",
        "f(x) is 3",
        '```json\n{"a": 1}\n```',
        "```python\nprint(4)\n```",
        "",
    ],
)
def test_an_answer_is_no_call(form, text):
    reply = parse_assistant(text, form)
    assert (reply.text, reply.calls) == (text.strip(), ())


@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        (LLAMA, '{"name": "add", "parameters": {"a": ', "not valid JSON"),
        (LLAMA, "<|python_tag|>import os", "no call follows"),
        (LLAMA, "[add(1, 2)]", "every argument needs its name"),
        (LLAMA, "[add(a=open('x'))]", "not a plain value"),
        (LLAMA, "[add(a=1", "not valid Python"),
        (LLAMA, "[add(a=" + "(" * 5000, "not valid Python"),
        (LLAMA, '{"name": "add", "parameters": [1]}', '"parameters" is not a JSON object'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add"', "not valid JSON"),
        (MISTRAL, '[TOOL_CALLS] [{"arguments": {}}]', 'no "name"'),
        (MISTRAL, "[TOOL_CALLS] [4]", "not a JSON object"),
        (JSON, '```json\n{"name": "add", "parameters": {\n```', "not valid JSON"),
        (JSON, "```tool_code\n1 + 1\n```", "holds no call"),
        (GEMMA, "<|tool_call>add", "not followed by call:name"),
        (GEMMA, '<|tool_call>call:add{a:<|"|>x', "a string is not closed"),
        (GEMMA, "<|tool_call>call:add{,", "a key is missing"),
        (GEMMA, '<|tool_call>call:add{<|"|>a<|"|>1}', "not followed by a colon"),
        (GEMMA, "<|tool_call>call:add{a:[1", "expected a comma"),
    ],
)
def test_a_broken_call_says_what_was_wrong_and_how_its_family_writes_one(form, text, words):
    broken = parse_assistant(text, form).calls[0]
    assert broken.error is not None
    assert words in broken.error
    assert form.example in broken.error


def test_a_call_keeps_the_id_that_mistral_gave_it():
    call = '{"name": "add", "arguments": {}, "id": "aB3dE6gH9"}'
    assert parse_assistant(f"[TOOL_CALLS] [{call}]", MISTRAL).calls[0].id == "aB3dE6gH9"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("… <tool_call> …", HERMES),
        ("… [TOOL_CALLS] …", MISTRAL),
        ("… <|python_tag|> …", LLAMA),
        ("… <|start_header_id|> …", LLAMA),
        ("… <start_of_turn> …", JSON),
        ('{%- set call_form = "json" -%} … <tool_call> …', JSON),
        (None, JSON),
    ],
)
def test_the_template_says_which_form_its_model_writes(template, form):
    assert format_of(template) is form


SCRAPS = [
    *'ab={}[]()",:\n ',
    ADD_P,
    SUB_A,
    "```json\n",
    "```",
    "[TOOL_CALLS]",
    "<tool_call>",
    "<|python_tag|>",
    "[add(",
]


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, JSON])
@settings(max_examples=80, deadline=None)
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=12))
def test_no_text_whatever_breaks_the_reader(form, scraps):
    reply = parse_assistant("".join(scraps), form)
    assert isinstance(reply.text, str)
    assert all(call.error or call.name for call in reply.calls)


ODD = {
    "text": 'a "b", {c}',
    "number_as_text": "42",
    "count": 3,
    "share": -0.5,
    "flag": False,
    "nested": {"list": [1, "two", None], "empty": {}},
}
ODD_TYPES = {"text": "string", "number_as_text": "string", "count": "integer", "share": "number", "flag": "boolean"}
ODD_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in ODD_TYPES.items()} | {"nested": {"type": "object"}},
        },
    },
}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_format_writes_it_reads_with_the_types_of_the_schema(form):
    reply = parse_assistant(form.write([("look_up", ODD)]), form, [ODD_TOOL])
    assert [(call.name, call.arguments, call.error) for call in reply.calls] == [("look_up", ODD, None)]
    two = parse_assistant(form.write([("look_up", ODD), ("look_up", {"text": "x"})]), form, [ODD_TOOL])
    assert [call.arguments for call in two.calls] == [ODD, {"text": "x"}]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_piece_of_a_call_breaks_its_reader(form, data):
    written = form.write([("look_up", ODD)])
    start = data.draw(st.integers(0, len(written)))
    end = data.draw(st.integers(start, len(written)))
    reply = parse_assistant(written[start:end], form, [ODD_TOOL])
    assert all(call.error or call.name for call in reply.calls)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        ("42", {"type": "integer"}, 42),
        ("True", {"type": "boolean"}, True),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("none of it", {"type": ["string", "null"]}, "none of it"),
        ("3", {"enum": ["3", "4"]}, "3"),
        ("{'a': [1, None]}", {"type": "object"}, {"a": [1, None]}),
        ('{"a": 1}', {"$ref": "#/$defs/A"}, {"a": 1}),
        ("many", {"type": "integer"}, "many"),
        ("tea", None, "tea"),
        ("42", None, 42),
    ],
)
def test_an_argument_written_as_text_gets_the_type_of_its_schema(text, schema, value):
    assert typed(text, schema) == value
