"""Reasoning is found by the tags of every family, and calls inside it are not executed."""

import pytest

from palestra.models.chat.callformats import FORMATS, HARMONY, HERMES, parse_assistant
from palestra.models.chat.streaming import StreamedReply
from palestra.models.chat.toolcalls import closing_tag, is_inside, split_reasoning, strip_reasoning

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


@pytest.mark.parametrize(
    "text",
    [
        "<think>hm</think>Four.",
        "[THINK]hm[/THINK]Four.",
        "<|channel>thought\nhm<channel|>Four.",
        "<seed:think>hm</seed:think>Four.",
        "<|START_THINKING|>hm<|END_THINKING|>Four.",
        "<think>hm</think><response>Four.</response>",
        "hm</think>Four.",
    ],
)
def test_reasoning_is_split_by_the_tags_of_each_family(text):
    reasoning, rest = split_reasoning(text)
    assert (reasoning, rest.strip(), strip_reasoning(text)) == ("hm", "Four.", "Four.")


@pytest.mark.parametrize("text", [f"I could {CALL}", f"I could {CALL}</think>", f"<think>I could {CALL}"])
def test_a_call_in_reasoning_that_the_prompt_opened_or_that_never_ends_is_not_executed(text):
    assert parse_assistant(text, HERMES, TOOLS, reasoning_is_open=not text.startswith("<think>")).calls == ()


def test_the_channels_of_harmony_are_reasoning_text_and_calls():
    text = (
        "<|channel|>analysis<|message|>I could use to=functions.add<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    reply = parse_assistant(text, HARMONY, TOOLS)
    assert (reply.reasoning, reply.text) == ("I could use to=functions.add", "One moment.")
    assert [(call.name, call.arguments) for call in reply.calls] == [("add", {"a": 1})]
    final = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert parse_assistant(final, HARMONY, TOOLS).text == "Four."


def test_a_call_in_the_analysis_channel_is_not_executed():
    text = '<|channel|>analysis<|message|>to=functions.add {"a": 1}<|end|>'
    assert parse_assistant(text, HARMONY, TOOLS).calls == ()
    assert is_inside(text.removesuffix("<|end|>"))
    assert not is_inside(text)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("<|im_start|>assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", False), ("[THINK]", True), ("", False)],
)
def test_a_prompt_shows_whether_it_opened_the_reasoning(prompt, is_open):
    assert bool(closing_tag(prompt)) is is_open


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_nothing_of_a_call_is_streamed_as_text_however_the_text_arrives(format, size):
    written = format.write([("add", {"a": 1})])
    lead = "" if format.at_start else "Let me see.\n"
    if format is HARMONY:
        lead = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    stream = StreamedReply(format, with_tools=True, reasoning_is_open=False)
    text = lead + written
    deltas = [delta for i in range(0, len(text), size) for delta in stream.push(text[i : i + size])]
    reply = parse_assistant(text, format, TOOLS)
    deltas += stream.rest(reply, text)
    assert [(call.name, call.arguments, call.format) for call in reply.calls] == [("add", {"a": 1}, "")]
    said = "".join(delta.text for delta in deltas if not delta.is_thinking)
    assert said.strip() == ("" if format is HARMONY else lead.strip())


def test_text_is_streamed_before_the_answer_ends():
    stream = StreamedReply(HERMES, with_tools=True, reasoning_is_open=True)
    assert [d.text for d in stream.push("hm")] == []
    assert [(d.text, d.is_thinking) for d in stream.push("</think>It is")] == [("hm", True), ("It is", False)]
    assert [d.text for d in stream.push(" 4 <tool")] == [" 4 "]
    assert [d.text for d in stream.push("box>")] == ["<toolbox>"]
