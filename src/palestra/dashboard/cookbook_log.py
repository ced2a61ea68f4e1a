"""Logs of the Tinker cookbook: what each trajectory earned, and the conversations of those that its logtree shows.

`…_rollout_summaries.jsonl` has a line for each trajectory, without text. `…_logtree.json` beside it is the tree of an
HTML page with the first groups of the iteration: for each attempt its prompt, the answer and a table with its reward,
in the order in which attempts ended, and after them a table for each trajectory, in the summaries' order. So groups
are told by their rewards, and of attempts with equal rewards nobody can say which is which.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from palestra.core.files import read_jsonl
from palestra.dashboard.foreign_rows import Row, as_number, as_text, foreign_row, message_row, numbers_of, to_messages

Node = Mapping[str, Any]  # an element of the page: tag, children, sometimes data
_SUMMARIES = "_rollout_summaries.jsonl"


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What the page shows of one trajectory."""

    messages: list[Row]
    reward: str | None  # with three digits, as in its table


@dataclass(frozen=True, slots=True)
class _Group:
    attempts: list[_Attempt]
    returns: list[str]  # of the trajectories, in their order


def cookbook_rows(file: Path, number: int) -> Iterator[Row]:
    """The rollouts of one iteration, of its training or of an evaluation."""
    shown = _groups(file.with_name(file.name.removesuffix(_SUMMARIES) + "_logtree.json"))
    for _, members in groupby(read_jsonl(file), lambda record: record.get("group_idx")):
        records = list(members)
        for record, conversation in zip(records, _conversations(records, shown), strict=True):
            yield _row(record, conversation)


def _row(record: Row, conversation: list[Row] | None) -> Row:
    steps = [step for step in record.get("steps") or () if isinstance(step, Mapping)]
    group, iteration = int(record.get("group_idx") or 0), int(record.get("iteration") or 0)
    metrics: dict[str, Any] = {}
    for found in (*(step.get("metrics") or {} for step in steps), record.get("trajectory_metrics") or {}):
        metrics |= found
    scores = numbers_of(metrics)
    messages = conversation or _without_text(record, steps)
    asked = [m["text"] for m in messages if m["role"] == "user"]
    question = asked[-1] if asked else ""  # those before it are examples
    problem = question[:80] if conversation and question else f"{iteration}/{group}"
    row = foreign_row(iteration, group, problem, messages, as_number(record.get("total_reward")), scores)
    row["question"] = question
    if "correct" in scores:  # as its recipes call the verdict; the reward has a penalty for the format in it
        row["passed"] = scores["correct"] >= 1.0
    return row if record.get("split", "train") == "train" else row | {"evaluation": iteration}


def _without_text(record: Row, steps: list[Node]) -> list[Row]:
    messages = [
        message_row("user", f"group {record.get('group_idx')}, {', '.join(map(str, record.get('tags') or []))}")
    ]
    for step in steps:
        lines = [f"{name}: {as_text(value)}" for name, value in (step.get("logs") or {}).items()]
        text = "\n".join(lines) or f"{step.get('ac_len')} tokens (the log has no text)"
        messages.append(message_row("assistant", text))
    return messages


def _conversations(records: list[Row], shown: list[_Group]) -> list[list[Row] | None]:
    """Of each trajectory of a group; the group is taken out of those that are shown."""
    returns = [f"{as_number(record.get('total_reward')):.3f}" for record in records]
    group = next((group for group in shown if group.returns == returns), None)
    if group is None:
        return [None] * len(records)
    shown.remove(group)
    left, found = list(group.attempts), []
    for record in records:
        own = f"{sum(as_number(step.get('reward')) for step in record.get('steps') or ()):.3f}"
        attempt = next((each for each in left if each.reward in (own, None)), None)
        if attempt is not None:
            left.remove(attempt)
        found.append(attempt.messages if attempt else None)
    return found


def _groups(file: Path) -> list[_Group]:
    """The groups that a page shows; none where there is no page, or one of another make."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        root = json.loads(file.read_bytes().decode("utf-8", "replace"))["root"]
        return [_group(body) for title, body in _sections(root, nested=True) if title == "Group Rollout"]
    return []


def _group(body: Node) -> _Group:
    attempts, returns, messages = [], [], list[Row]()
    for title, part in _sections(body):
        if title == "Trajectory Details":
            returns = [_table(trajectory)["total_return"] for _, trajectory in _sections(part)]
            continue
        for data in _data(part):
            messages += to_messages(data.get("messages"), "assistant")
        if title == "Reward":
            attempts.append(_Attempt(messages, _table(part).get("reward")))
            messages = []
    return _Group(attempts, returns)


def _sections(node: Node, *, nested: bool = False) -> Iterator[tuple[str, Node]]:
    """The sections below an element with their titles; `nested`: those within others, too."""
    for child in node.get("children") or ():
        if not isinstance(child, Mapping):
            continue
        is_section = child.get("tag") == "section"
        if is_section:
            yield "".join(map(str, child["children"][0]["children"])), child
        if nested or not is_section:
            yield from _sections(child, nested=nested)


def _data(node: Node) -> Iterator[Node]:
    if isinstance(node.get("data"), Mapping) and node["data"].get("type") == "conversation":
        yield node["data"]
    for child in node.get("children") or ():
        if isinstance(child, Mapping):
            yield from _data(child)


def _table(node: Node) -> dict[str, str]:
    """The rows of two cells of all tables below an element; the last one wins."""
    found: dict[str, str] = {}
    for child in node.get("children") or ():
        if not isinstance(child, Mapping):
            continue
        cells = child.get("children") or ()
        if child.get("tag") == "tr" and len(cells) == 2:
            key, value = ("".join(map(str, cell["children"])) for cell in cells)
            found[key] = value
        found |= _table(child)
    return found
