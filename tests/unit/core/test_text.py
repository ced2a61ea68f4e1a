"""Text and JSON from outside: lone surrogates, depth and length."""

import pytest

from palestra.core.messages import as_messages, from_dict
from palestra.core.text import MAX_JSON_DEPTH, as_text, encodable, is_shallow, read_json
from palestra.core.types import MAX_REASON_CHARS, Message, Problem, Rollout, Score, ToolCall

HALF = "half \ud83d, whole 😀"
CLEAN = "half ?, whole 😀"


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert encodable({HALF: [HALF, (HALF, 1, None)]}) == {CLEAN: [CLEAN, (CLEAN, 1, None)]}
    assert [message.text for message in as_messages(HALF)] == [CLEAN]
    assert from_dict({"role": "user", "content": [{"type": "text", "text": HALF}]}).text == CLEAN
    assert read_json('{"\\ud83d": "\\ude00"}') == {"?": "?"}


def test_everything_that_holds_a_text_from_outside_can_be_encoded():
    call = ToolCall(HALF, HALF, {HALF: [HALF]}, HALF)
    assert (call.id, call.name, call.arguments, call.error) == (CLEAN, CLEAN, {CLEAN: [CLEAN]}, CLEAN)
    message = Message("tool", HALF, (), HALF, HALF, HALF)
    assert {message.text, message.tool_call_id, message.name, message.reasoning} == {CLEAN}
    problem = Problem(HALF, HALF, [HALF], {HALF: HALF})
    assert (problem.id, problem.input, problem.expect, problem.row) == (CLEAN, CLEAN, [CLEAN], {CLEAN: CLEAN})
    rollout = Rollout(HALF, (), (), "failed", error=HALF, tool_names=(HALF,), info={"result": HALF}, states=(HALF,))
    assert {rollout.problem_id, rollout.error, *rollout.tool_names, *rollout.states} == {CLEAN}
    assert rollout.info == {"result": CLEAN}
    assert Score(1.0, True, HALF).reason == CLEAN


class NoText:
    def __str__(self):
        raise RuntimeError("no text")


CYCLIC: list = []
CYCLIC.append(CYCLIC)


@pytest.mark.parametrize("value", [NoText(), CYCLIC, nested(5000), b"\xff", 3, {"a": HALF}], ids=list("012345"))
def test_a_reason_that_is_no_text_becomes_one(value):
    reason = Score(1.0, True, value).reason
    assert reason == as_text(value)
    assert reason.encode()


def test_a_long_reason_is_cut():
    reason = Score(1.0, True, "x" * 5_000_000).reason
    assert len(reason) < MAX_REASON_CHARS + 100
    assert f"first {MAX_REASON_CHARS} of 5000000" in reason


def test_the_depth_of_json_is_bounded():
    assert is_shallow(nested(MAX_JSON_DEPTH))
    assert not is_shallow(nested(MAX_JSON_DEPTH + 1))
    assert not is_shallow([{"a": nested(MAX_JSON_DEPTH)}])
    for depth in (MAX_JSON_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            read_json("[" * depth + "]" * depth)
