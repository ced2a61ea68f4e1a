"""Numbering of tool calls."""

from palestra.core.messages import number_calls
from palestra.core.types import Message, ToolCall, ToolResult


def test_calls_that_the_environment_answers_itself_are_numbered_too() -> None:
    asked = Message("assistant", "", (ToolCall("call_0", "look", {}),))
    messages = [asked, Message("tool", "seen", tool_call_id="call_0")] * 2
    result = ToolResult(ToolCall("call_0", "look", {}), "seen", True, 0.0)
    numbered, results = number_calls(messages, [])
    assert [m.tool_call_id for m in numbered[1::2]] == ["call_0", "call_1"]
    assert results == []
    assert [r.call.id for r in number_calls(messages, [result, result])[1]] == ["call_0", "call_1"]
