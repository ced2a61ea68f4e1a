"""Rollouts as lines of a run's files, and back.

A line has the fields of the dataclasses: a new field of `Rollout` or column of `Turn` is written and read by itself.

    >>> line = rollout_to_dict(Rollout("p", (Turn("model", (7,), (-0.5,), 3),), (), "answered"))
    >>> line["turns"]
    [{'maker': 'model', 'token_ids': [7], 'logprobs': [-0.5], 'policy_version': 3}]
    >>> rollout_from_dict(line).turns[0].versions.tolist()
    [3]
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np

from palestra.core.types import COLUMNS, Array, Group, Lineage, Message, Rollout, Score, ToolCall, ToolResult, Turn

NOT_TRAINED = -100  # in the masks of the Atropos wire


class _Fields:
    """How a dataclass is written: keys that are always there, then its other fields where they are not their default.

    Older readers know no other keys. What is not written here is written by hand, or not at all.
    """

    def __init__(
        self,
        kind: type[Any],
        *always: str,
        by_hand: Sequence[str] = (),
        readers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
        **write: Callable[[Any], Any],
    ) -> None:
        self._kind = kind
        self.defaults = {f.name: default for f in fields(kind) if (default := _default(f)) is not MISSING}
        kinds = {f.name: str(f.type).partition("[")[0] for f in fields(kind)}
        writers = {name: _WRITE[kind] for name, kind in kinds.items() if kind in _WRITE} | write
        tuples = {name: tuple for name, kind in kinds.items() if kind == "tuple"}
        self._readers = [(name, (tuples | dict(readers)).get(name)) for name in kinds]
        rest = [name for name in kinds if name not in always and name not in by_hand]
        self._always = [(name, writers.get(name)) for name in always]
        self._rest = [(name, self.defaults[name], writers.get(name)) for name in rest]

    def to_dict(self, value: Any) -> dict[str, Any]:
        record = {}
        for name, write in self._always:
            item = getattr(value, name)
            record[name] = item if write is None else write(item)
        for name, default, write in self._rest:
            if (item := getattr(value, name)) != default:
                record[name] = item if write is None else write(item)
        return record

    def read(self, record: Mapping[str, Any], parts: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The value of a record without `parts`. Null stands for a default; other keys are ignored."""
        found = dict(parts)
        for name, reader in self._readers:
            if name in found or (name in self.defaults and record.get(name) is None):
                continue
            item = record[name]
            found[name] = item if reader is None else reader(item)
        return self._kind(**found)


_WRITE: dict[str, Callable[[Any], Any]] = {"tuple": list, "Mapping": dict}


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


def rollout_to_dict(rollout: Rollout, *, exact: bool = False, with_routing: bool = False) -> dict[str, Any]:
    """One rollout: what was said, who made which tokens, and how it was scored. A line of rollouts.jsonl.

    With `exact` it can be trained on again: logprobs to the last bit, the version of each token, its advantages.
    `with_routing` adds the experts that the sampler recorded.
    """
    record = {"problem_id": rollout.problem_id, **outcome_fields(exact, with_routing).to_dict(rollout)}
    record["messages"] = list(map(_message_fields, rollout.messages))
    record["turns"] = list(map(_turn_to_dict, rollout.turns, repeat(exact), repeat(with_routing)))
    if exact and rollout.advantages is not None:
        record["advantages"] = rollout.advantages.tolist()
    return record


@cache
def outcome_fields(exact: bool, with_routing: bool = False) -> _Fields:
    """The common part of a line and of a group's columns."""
    return _Fields(
        Rollout,
        *("reward", "passed", "stop", "error", "scores", "tool_names", "tool_results", "seconds", "tool_seconds"),
        by_hand=("problem_id", "messages", "turns", "advantages"),
        scores=lambda scores: dict(zip(scores, map(_SCORE.to_dict, scores.values()), strict=True)),
        tool_results=lambda results: list(map(_result_to_dict, results)),
        seconds=partial(round, ndigits=4),
        tool_seconds=partial(round, ndigits=4),
        readers=_READ,
        lineages=lambda lineages: [_lineage_to_dict(lineage, exact, with_routing) for lineage in lineages],
    )


def rollout_from_dict(record: Mapping[str, Any], **parts: Any) -> Rollout:
    """A rollout out of such a line, or of one without `parts`. The texts of its tool results are among its messages."""
    if missing := {"reward", "scores"} - record.keys() - parts.keys():
        raise KeyError(*missing)
    rollout: Rollout = outcome_fields(True).read({"stop": "answered", **record}, parts)
    return rollout


def group_from_record(record: Mapping[str, Any]) -> Group:
    """A group in a journal of version 0.2."""
    return Group(record["problem_id"], tuple(map(rollout_from_dict, record["rollouts"])), record["metrics"])


_READ: dict[str, Callable[[Any], Any]] = {
    "turns": lambda turns: tuple(map(_turn_from_dict, turns)),
    "messages": lambda messages: tuple(map(_message_from_fields, messages)),
    "scores": lambda scores: {name: _SCORE.read(verdict) for name, verdict in scores.items()},
    "tool_results": lambda results: tuple(map(_result_from_dict, results)),
    "lineages": lambda lineages: tuple(map(_LINEAGE.read, lineages)),
    "advantages": lambda advantages: np.asarray(advantages, np.float32),
}
_SCORE: _Fields = _Fields(Score, "value", "passed", "reason", "error")
_LINEAGE: _Fields = _Fields(Lineage, "stop", by_hand=("turns", "messages", "advantages"), readers=_READ)
_LINE_COLUMNS = [column for column in COLUMNS if column.decimals is not None]
_EXACT_COLUMNS = [column for column in COLUMNS if column.decimals is None]


def _turn_to_dict(turn: Turn, exact: bool, with_routing: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"maker": turn.maker, "token_ids": turn.token_ids.tolist()}
    if turn.maker == "model":
        for column in _LINE_COLUMNS:
            array = getattr(turn, column.name)
            if column.default == () or (array != column.default).any():
                rounded = array if exact else array.astype(np.float64).round(column.decimals)
                record[column.name] = _without_nan(rounded)
        record["policy_version"] = min(turn.versions.tolist(), default=0)
        if exact:
            for column in _EXACT_COLUMNS:
                record[column.name] = _without_nan(getattr(turn, column.name))
            record["finish"] = turn.finish
    if with_routing and turn.routing is not None:
        data = base64.b64encode(zlib.compress(np.ascontiguousarray(turn.routing).tobytes(), 1)).decode()
        record["routing"] = {"dtype": str(turn.routing.dtype), "shape": list(turn.routing.shape), "data": data}
    return record


def _without_nan(array: Array) -> list[Any]:
    values: list[Any] = array.tolist()
    if math.isnan(sum(values)):  # JSON has no NaN
        return [None if math.isnan(value) else value for value in values]
    return values


def _turn_from_dict(record: Mapping[str, Any]) -> Turn:
    ids = record["token_ids"]
    routing = None
    if kept := record.get("routing"):
        data = zlib.decompress(base64.b64decode(kept["data"]))
        routing = np.frombuffer(data, np.dtype(kept["dtype"])).reshape(kept["shape"])
    if record["maker"] != "model":
        return Turn(record["maker"], ids, routing=routing)
    columns = {column.name: record.get(column.name) for column in COLUMNS}
    columns["logprobs"] = columns["logprobs"] or [np.nan] * len(ids)
    if columns["versions"] is None:
        columns["versions"] = record["policy_version"]
    known = {name: values for name, values in columns.items() if values is not None}
    return Turn("model", ids, finish=record.get("finish"), routing=routing, **known)


def _lineage_to_dict(lineage: Lineage, exact: bool, with_routing: bool = False) -> dict[str, Any]:
    record = _LINEAGE.to_dict(lineage)
    turns = list(map(_turn_to_dict, lineage.turns, repeat(exact), repeat(with_routing)))
    return {
        "stop": record.pop("stop"),
        "turns": turns,
        "messages": list(map(_message_fields, lineage.messages)),
        **record,
    }


def _message_from_fields(fields: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in fields["tool_calls"])
    return Message(fields["role"], fields["text"], calls, fields["tool_call_id"], fields["name"])


def _message_fields(message: Message) -> dict[str, Any]:
    """As `asdict`, without its copies: there are thousands of records in a step."""
    calls = []
    for call in message.tool_calls:
        calls.append({"id": call.id, "name": call.name, "arguments": call.arguments, "error": call.error})
        if call.format:
            calls[-1]["format"] = call.format
    return {
        "role": message.role,
        "text": message.text,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


def _result_to_dict(result: ToolResult) -> dict[str, Any]:
    call = result.call
    record = {"id": call.id, "name": call.name, "ok": result.ok, "seconds": round(result.seconds, 4)}
    for name, value in (("raised", result.raised), ("error", call.error), ("format", call.format)):
        if value:
            record[name] = value
    return record


def _result_from_dict(record: Mapping[str, Any]) -> ToolResult:
    """Its text is among the messages."""
    call = ToolCall(record["id"], record["name"], error=record.get("error"), format=record.get("format") or "")
    return ToolResult(call, "", record["ok"], record["seconds"], bool(record.get("raised")))
