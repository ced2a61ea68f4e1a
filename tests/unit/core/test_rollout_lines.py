"""The lines of rollouts.jsonl, byte for byte as earlier versions wrote tests/data/rollout_lines.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from palestra.core.files import append_jsonl
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Group, Lineage, Message, Rollout, Score, ToolCall, ToolResult, Turn

STORED = Path(__file__).parents[2] / "data" / "rollout_lines.jsonl"
CALL_FIELDS = ("id", "name", "error", "format")
KINDS = ({}, {"exact": True}, {"exact": True, "with_routing": True})


def whole_group() -> Group:
    """Two rollouts, of which the first has all that a rollout can have, and one that failed."""
    routing = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    call = ToolCall("c1", "add", {"a": 1, "b": [2, "é", None], "deep": {"x": 1.5}}, format="json")
    broken = ToolCall("c2", "", {}, error='no closing bracket: {"näme"', format="xml")
    scores = {
        "right": Score(0.5, False, "half of it — ½", error=True),
        "roles": Score(1.25, True, roles={"solver": 1.0, "critic": 0.25}),
        "turns": Score(-0.3, None, "per turn", counts=False, turns=(0.1, -0.4)),
    }
    turns = (
        Turn("template", (1, 2, 3)),
        Turn("model", (5, 6), (-0.123456789, math.nan), (4, 5), "stop", routing),
        Turn("template", (19,)),
        Turn("environment", (20, 21, 22)),
        Turn("model", (9, 10), (0.0, -2.7182817), 7, "length"),
        Turn("model", (), (), (), "cancelled"),
    )
    messages = (
        Message("system", "Be brief. 🤖"),
        Message("user", "1 + 1?\n\u2028"),
        Message("assistant", "Let me see.", (call, broken), reasoning="one and one"),
        Message("tool", "2", tool_call_id="c1", name="add"),
        Message("assistant", "It is 2."),
    )
    results = (
        ToolResult(call, "2", ok=False, seconds=0.123456, raised=True),
        ToolResult(broken, "wrong", ok=False),
        ToolResult(ToolCall("c3", "add", {}), "3", seconds=2.0),
    )
    helper = Lineage(
        (Turn("template", (1, 2), routing=routing[:1]), Turn("model", (2, 3), (-0.5, -0.25), 4, "stop")),
        (Message("user", "help"), Message("assistant", "no", (ToolCall("x", "f"),))),
        "truncated",
        "critic",
        np.array([0.0, 0.0, 1.0, 1.0], np.float32),
    )
    plain = Lineage((Turn("template", (7,)),), (), "answered")
    full = Rollout(
        problem_id="p/ü",
        turns=turns,
        messages=messages,
        stop="context_full",
        tool_results=results,
        scores=scores,
        reward=0.1 + 0.2,
        seconds=12.3456789,
        tool_seconds=0.00004,
        error="the tool server is gone: \ud83d",
        advantages=np.linspace(-1, 1, 11, dtype=np.float32),
        tool_names=("add", "mül"),
        lineages=(helper, plain),
        info={"exit_code": 1, "summaries": [1, 3], "log": "…"},
        role="solver",
        states=("start", "ende ß"),
    )
    usual = Rollout(
        problem_id="p/ü",
        turns=(Turn("template", (1, 2)), Turn("model", (7, 8), (math.nan, -0.5), 3, "stop")),
        messages=(Message("user", "hi"), Message("assistant", "hello")),
        stop="answered",
        scores={"right": Score(1.0, True)},
        reward=1.0,
        seconds=0.5,
    )
    failed = Rollout("p/ü", (), (Message("user", "hi"),), "failed", error="the prompt is too long")
    return Group("p/ü", (full, usual, failed), {"agent/rows": 2.0, "broken": math.nan})


def write(path: Path) -> None:
    group = whole_group()
    append_jsonl(path, (rollout_to_dict(rollout, **kind) for kind in KINDS for rollout in group.rollouts))


def test_lines_are_those_of_earlier_versions(tmp_path: Path) -> None:
    write(tmp_path / "lines.jsonl")
    ours, stored = ((file.read_bytes().splitlines()) for file in (tmp_path / "lines.jsonl", STORED))
    assert ours == stored[:-2]


def test_columns_are_those_of_earlier_versions(tmp_path: Path) -> None:
    columns = pytest.importorskip("palestra.extras.atropos.columns")
    group, path = whole_group(), tmp_path / "lines.jsonl"
    append_jsonl(path, [columns.group_to_dict(group), columns.group_to_dict(group, mask_truncated=True)])
    assert path.read_bytes().splitlines() == STORED.read_bytes().splitlines()[-2:]


def test_exact_lines_are_read_back_as_the_rollouts_that_they_were() -> None:
    count = len(whole_group().rollouts)
    lines = [json.loads(line) for line in STORED.read_bytes().splitlines()]
    for line, rollout in zip(lines[2 * count : 3 * count], whole_group().rollouts, strict=True):
        again = rollout_from_dict(line)
        for name in ("problem_id", "turns", "messages", "stop", "scores", "reward", "error", "tool_names", "info"):
            assert getattr(again, name) == getattr(rollout, name), name
        assert (again.role, again.states) == (rollout.role, rollout.states)
        assert [(c.turns, c.messages, c.stop, c.role) for c in again.lineages] == [
            (c.turns, c.messages, c.stop, c.role) for c in rollout.lineages
        ]
        assert np.array_equal(again.advantages, rollout.advantages)  # type: ignore[arg-type]
        for ours, theirs in zip(again.tool_results, rollout.tool_results, strict=True):
            assert [getattr(ours.call, n) for n in CALL_FIELDS] == [getattr(theirs.call, n) for n in CALL_FIELDS]
            assert (ours.ok, ours.raised, ours.seconds) == (theirs.ok, theirs.raised, round(theirs.seconds, 4))
