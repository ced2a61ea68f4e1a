"""Conversations in each format become the same messages; what is wrong is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.core.conversations import Conversation, conversation_of, read_conversations
from palestra.core.errors import InputError, PalestraError, UnreadableFileError
from palestra.core.types import Message, ToolCall

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "price", "description": "Look up.", "parameters": SCHEMA}}


def call(call_id: str, item: str, as_text: bool = True) -> dict[str, Any]:
    arguments: Any = {"item": item}
    return {"id": call_id, "function": {"name": "price", "arguments": json.dumps(arguments) if as_text else arguments}}


THOUGHT = {"reasoning_content": "Two calls."}
TWO_CALLS = [call("a", "tea"), call("b", "milk", as_text=False)]
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Tea "}, {"type": "text", "text": "and milk?"}]},
        {"role": "assistant", "content": None, "tool_calls": TWO_CALLS, **THOUGHT},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "4"},
        {"role": "assistant", "content": "4 and 2."},
    ],
    "tools": [TOOL],
}
BLOCKS = [
    {"type": "thinking", "thinking": "Two calls.", "signature": "x"},
    {"type": "tool_use", "id": "a", "name": "price", "input": {"item": "tea"}},
    {"type": "tool_use", "id": "b", "name": "price", "input": {"item": "milk"}},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
    {"type": "tool_result", "tool_use_id": "a", "content": "4"},
]
ANTHROPIC = {
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Tea and milk?"},
        {"role": "assistant", "content": BLOCKS},
        {"role": "user", "content": RESULTS},
        {"role": "assistant", "content": [{"type": "text", "text": "4 and 2."}]},
    ],
    "tools": [{"name": "price", "description": "Look up.", "input_schema": SCHEMA}],
}
EXPECTED = (
    Message("system", "Be brief."),
    Message("user", "Tea and milk?"),
    Message("assistant", "", (ToolCall("a", "price", {"item": "tea"}), ToolCall("b", "price", {"item": "milk"}))),
    Message("tool", "2", (), "b", "price"),
    Message("tool", "4", (), "a", "price"),
    Message("assistant", "4 and 2."),
)


def written(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read_one(tmp_path: Path, record: Any) -> Conversation:
    (conversation,) = read_conversations(written(tmp_path, record))
    return conversation


@pytest.mark.parametrize("record", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def test_parallel_calls_results_reasoning_and_tools_are_the_same_in_each_format(tmp_path, record):
    conversation = read_one(tmp_path, record)
    assert conversation.messages == EXPECTED
    assert conversation.tools == (TOOL,)
    assert conversation.messages[2].reasoning == "Two calls."
    assert sum(bool(message.reasoning) for message in conversation.messages) == 1
    assert conversation.origin == f"{tmp_path / 'traces.jsonl'}, line 1"


@pytest.mark.parametrize("as_text", [True, False])
def test_a_completion_is_trained_and_its_prompt_is_not(tmp_path, as_text):
    prompt = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}]
    question = {"role": "user", "content": "Tea?"}
    answer = {"role": "assistant", "content": "4."}
    record = {"prompt": [*prompt, question], "completion": [answer]}
    if as_text:
        record = {"prompt": "Tea?", "completion": "4."}
    conversation = read_one(tmp_path, record)
    assert [m.text for m in conversation.messages] == ([] if as_text else ["Hi", "Hi."]) + ["Tea?", "4."]
    assert conversation.untrained == (frozenset() if as_text else frozenset({1}))


def test_a_whole_document_is_read_as_one_conversation_and_a_list_as_several(tmp_path):
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(ANTHROPIC, indent=2))
    assert read_conversations(path)[0].messages == EXPECTED
    other = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}
    path.write_text(json.dumps([OPENAI, other], indent=2))
    assert [c.origin for c in read_conversations(path)] == [f"{path}, entry 1", f"{path}, entry 2"]


def test_functions_before_tool_calls_are_read_as_tools(tmp_path):
    messages = [
        {"role": "user", "content": "Tea?"},
        {"role": "assistant", "content": None, "function_call": {"name": "price", "arguments": '{"item": "tea"}'}},
        {"role": "function", "name": "price", "content": "4"},
        {"role": "assistant", "content": "4."},
    ]
    conversation = read_one(tmp_path, {"messages": messages, "tools": [TOOL]})
    assert conversation.messages[1].tool_calls[0].arguments == {"item": "tea"}
    assert conversation.messages[2] == Message("tool", "4", (), "call_0", "price")


def test_weight_0_is_kept_and_comes_back_from_what_is_written(tmp_path):
    record = json.loads(json.dumps(OPENAI))
    record["messages"][2]["weight"] = 0
    conversation = read_one(tmp_path, record)
    assert conversation.untrained == {2}
    again = read_one(tmp_path, conversation.to_dict())
    assert again == conversation


def test_instructions_go_in_front_only_where_there_is_no_system_message(tmp_path):
    conversation = read_one(tmp_path, OPENAI)
    assert conversation.with_system("Other.") is conversation
    bare = conversation_of([to for to in OPENAI["messages"][1:]])
    moved = bare.with_system("Be brief.")
    assert moved.messages == EXPECTED
    assert [message.reasoning for message in moved.messages[:3]] == ["", "", "Two calls."]


def test_requests_of_one_agent_are_one_conversation_with_all_reasoning(tmp_path, caplog):
    messages = OPENAI["messages"]
    without = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    longer = [*without, {"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Welcome."}]
    lines = [{"messages": m, "tools": [TOOL]} for m in (messages[:3], longer, without)]
    (conversation,) = read_conversations(written(tmp_path, *lines))
    assert len(conversation.messages) == len(longer)
    assert conversation.messages[2].reasoning == "Two calls."
    assert sum(bool(message.reasoning) for message in conversation.messages) == 1


def changed(place: int, **fields: Any) -> dict[str, Any]:
    record = json.loads(json.dumps(OPENAI))
    record["messages"][place] |= fields
    return record


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{not json", "line 2 is not valid JSON"),
        ("[1]", "expected a JSON object"),
        ({"prompt": "x"}, "format of an object with the keys"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "begins with an assistant message"),
        (changed(1, role="customer"), "the role 'customer'"),
        (changed(1, content=[{"type": "image_url", "image_url": {}}]), "not text"),
        (changed(1, weight=0), "only an assistant's"),
        (changed(5, weight=0.5), "weight 0.5"),
        (changed(3, tool_call_id="zz"), "result of call 'zz'"),
        (changed(4, role="user"), "has no result"),
        (changed(2, tool_calls=[{"id": "a", "function": {"name": "price", "arguments": "{"}}]), "not valid JSON"),
        (changed(2, tool_calls=[{"id": "a", "function": {"arguments": "{}"}}]), "no name"),
        (changed(2, tool_calls=[call("a", "x"), call("a", "y")]), "same id"),
        ({**ANTHROPIC, "messages": [{"role": "system", "content": "x"}]}, "Anthropic's are user and assistant"),
        ({"system": "x", "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "ShareGPT files"),
        ({"schema_version": "ATIF-v1.0", "steps": []}, 'ATIF files {"steps": […]} are no longer read; convert each'),
    ],
)
def test_a_wrong_line_is_named_with_its_number_and_reason(tmp_path, record, says):
    path = written(tmp_path, OPENAI, record)
    with pytest.raises(PalestraError) as error:
        read_conversations(path)
    assert f"{path}, line 2" in str(error.value)
    assert says in str(error.value)


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path):
    with pytest.raises(UnreadableFileError, match="cannot be read"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no conversations"):
        read_conversations(written(tmp_path, ""))
