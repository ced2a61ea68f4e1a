"""A rollout with a call, its result and an answer, and what is the same once it was written and read."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from palestra.core.types import Message, Rollout, Score, ToolCall, ToolResult, Turn

CALL = ToolCall("c1", "add", {"a": 1, "b": [2, "é"]}, format="json")


def rollout(reward: float = 1.0, *ids: int, **changes) -> Rollout:
    """A call, a tool's result of three tokens, and an answer that was sampled while the weights changed."""
    ids = ids or (5, 6)
    whole = Rollout(
        problem_id="p",
        turns=(
            Turn("template", (1, 2, 3)),
            Turn("model", ids, [-0.1 * i for i in ids], 4, "stop"),
            Turn("template", (19,)),
            Turn("environment", (20, 21, 22)),
            Turn("model", (9, 10), (0.0, -2.7182817), (4, 5), "stop"),
        ),
        messages=(
            Message("user", "1 + 1?"),
            Message("assistant", "Let me see.", (CALL,)),
            Message("tool", "2", tool_call_id="c1", name="add"),
            Message("assistant", "It is 2."),
        ),
        stop="answered",
        tool_results=(ToolResult(CALL, "2", ok=False, seconds=0.25),),
        scores={"right": Score(0.5, False, "half of it", error=True), "short": Score(1.0, True)},
        reward=reward,
        seconds=1.5,
        tool_seconds=0.5,
    )
    return replace(whole, **changes)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def assert_same(again: Rollout, whole: Rollout, *, logprobs: float = 0.0) -> None:
    """The same but for what is not written: why a turn ended, and a tool result's text, which is a message."""
    assert [t.maker for t in again.turns] == [t.maker for t in whole.turns]
    for ours, theirs in zip(again.turns, whole.turns, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=logprobs)
    for name in ("problem_id", "messages", "stop", "scores", "reward", "seconds", "tool_seconds", "error", "passed"):
        assert getattr(again, name) == getattr(whole, name), name
    assert [(r.call.id, r.call.name, r.ok, r.seconds) for r in again.tool_results] == [
        (r.call.id, r.call.name, r.ok, r.seconds) for r in whole.tool_results
    ]
