"""Groups and rollouts as JSON: columns of a group for the wire and `env process`, one line a rollout on disk.

A group is written in columns with one entry for each rollout, by the names of the Atropos wire: `tokens`, `masks`
(the id where the model made the token, -100 elsewhere), `inference_logprobs`, `scores` (the rewards), `messages`,
and `advantages` where rollouts have their own. Our own columns say the rest: `turns` ([maker, token count] pairs),
`versions`, `stops`, `errors`, `verdicts`, `tool_names`, `tool_results`, `seconds`, `tool_seconds`; where there are any,
`lineages`, `states`, `info` and `roles` of each rollout and `metrics` of the group. What a foreign environment leaves
out is derived from its masks as far as possible.

    >>> columns = {"tokens": [[1, 2, 7], [1, 2, 8]], "masks": [[-100, -100, 7], [-100, -100, 8]], "scores": [1.0, 0.0]}
    >>> group = group_from_dict(columns, "g", version=3)
    >>> [(turn.maker, turn.token_ids.tolist()) for turn in group.rollouts[0].turns]
    [('template', [1, 2]), ('model', [7])]
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from palestra.core.errors import InputError, PalestraError
from palestra.core.messages import from_dict, to_dict
from palestra.core.types import Array, Group, Lineage, Message, Rollout, Score, ToolCall, ToolResult, Turn

NOT_TRAINED = -100
NO_LOGPROB = 1.0  # what clients of the wire fill in; no sampled token can have it


# columns of a group whose names differ from those of a rollout's line
_COLUMNS = {"reward": "scores", "scores": "verdicts", "stop": "stops", "error": "errors", "role": "roles"}
_RARE = {"lineages": [], "info": {}, "role": "", "states": []}  # written only where there are any: their defaults


def rollout_to_dict(rollout: Rollout, *, exact: bool = False, with_routing: bool = False) -> dict[str, Any]:
    """One rollout: what was said, who made which tokens, and how it was scored. A line of rollouts.jsonl.

    With `exact` it can be trained on again: logprobs to the last bit, the version of each token, its advantages.
    `with_routing` adds the experts that the sampler recorded.
    """
    record = {"problem_id": rollout.problem_id, **_outcome(rollout, exact, with_routing)}
    record["messages"] = list(map(_message_fields, rollout.messages))
    record["turns"] = [_turn_to_dict(turn, exact, with_routing) for turn in rollout.turns]
    if exact and rollout.advantages is not None:
        record["advantages"] = rollout.advantages.tolist()
    return record


def _outcome(rollout: Rollout, exact: bool, with_routing: bool = False) -> dict[str, Any]:
    """The common part of a line and of a group's columns; without empty rare keys, which older readers do not know."""
    scores = {}
    for name, score in rollout.scores.items():
        verdict: dict[str, Any] = {
            "value": score.value, "passed": score.passed, "reason": score.reason, "error": score.error,
        }  # fmt: skip
        scores[name] = verdict
        if not score.counts:
            verdict["counts"] = False
        if score.roles:
            verdict["roles"] = dict(score.roles)
        if score.turns:
            verdict["turns"] = list(score.turns)
    record: dict[str, Any] = {
        "reward": rollout.reward,
        "passed": rollout.passed,
        "stop": rollout.stop,
        "error": rollout.error,
        "scores": scores,
        "tool_names": list(rollout.tool_names),
        "tool_results": list(map(_result_to_dict, rollout.tool_results)),
        "seconds": round(rollout.seconds, 4),
        "tool_seconds": round(rollout.tool_seconds, 4),
    }
    if rollout.lineages:
        record["lineages"] = [_lineage_to_dict(lineage, exact, with_routing) for lineage in rollout.lineages]
    if rollout.info:
        record["info"] = dict(rollout.info)
    if rollout.role:
        record["role"] = rollout.role
    if rollout.states:
        record["states"] = list(rollout.states)
    return record


def rollout_from_dict(record: Mapping[str, Any]) -> Rollout:
    """A rollout out of such a line. The texts of its tool results are among its messages."""
    return _rollout(
        record,
        record["problem_id"],
        turns=tuple(_turn_from_dict(turn) for turn in record["turns"]),
        messages=tuple(_message_from_fields(fields) for fields in record["messages"]),
        scores={name: _score_from_dict(verdict) for name, verdict in record["scores"].items()},
        advantages=None if "advantages" not in record else np.asarray(record["advantages"], dtype=np.float32),
    )


def _rollout(record: Mapping[str, Any], problem_id: str, **parts: Any) -> Rollout:
    """A rollout with these parts, and the rest of its outcome by `record`, which may lack what earlier versions did."""
    return Rollout(
        problem_id=problem_id,
        stop=record.get("stop") or "answered",
        tool_results=tuple(_result_from_dict(result) for result in record.get("tool_results") or ()),
        reward=record["reward"],
        seconds=record.get("seconds") or 0.0,
        tool_seconds=record.get("tool_seconds") or 0.0,
        error=record.get("error"),
        tool_names=tuple(record.get("tool_names") or ()),
        lineages=tuple(map(_lineage_from_dict, record.get("lineages") or ())),
        info=record.get("info") or {},
        role=record.get("role") or "",
        states=tuple(record.get("states") or ()),
        **parts,
    )


def group_to_record(group: Group) -> dict[str, Any]:
    """A whole group, exactly, as its rollouts' lines: for a journal, or from one process of ours to another."""
    rollouts = [rollout_to_dict(rollout, exact=True, with_routing=True) for rollout in group.rollouts]
    return {"problem_id": group.problem_id, "metrics": dict(group.metrics), "rollouts": rollouts}


def group_from_record(record: Mapping[str, Any]) -> Group:
    return Group(record["problem_id"], tuple(map(rollout_from_dict, record["rollouts"])), record["metrics"])


def group_to_dict(group: Group, *, mask_truncated: bool = False) -> dict[str, Any]:
    """The columns of a group. `mask_truncated` leaves rollouts that were cut off out of `masks`."""
    rollouts = group.rollouts
    masked = [r.error is not None or (mask_truncated and r.cut_off) for r in rollouts]
    outcomes = [_outcome(rollout, exact=True) for rollout in rollouts]
    columns: dict[str, Any] = {"problem_id": group.problem_id}
    for key in {key: None for outcome in outcomes for key in outcome}:
        columns[_COLUMNS.get(key, key)] = [outcome.get(key, _RARE.get(key)) for outcome in outcomes]
    tokens = [_flat(r, lambda turn: turn.token_ids) for r in rollouts]
    masks = [_flat(r, lambda turn: _or_fill(turn.token_ids, turn, NOT_TRAINED)) for r in rollouts]
    columns |= {
        "messages": [[to_dict(m, arguments_as_text=True) for m in r.messages] for r in rollouts],
        "tokens": tokens,
        "masks": [[NOT_TRAINED] * len(mask) if m else mask for mask, m in zip(masks, masked, strict=True)],
        "inference_logprobs": [_flat(r, _known_logprobs) for r in rollouts],
        "versions": [_flat(r, lambda turn: _or_fill(turn.versions, turn, 0)) for r in rollouts],
        "turns": [[[turn.maker, len(turn.token_ids)] for turn in r.turns] for r in rollouts],
    }
    advantages = [r.advantages.tolist() for r in rollouts if r.advantages is not None]
    if len(advantages) == len(rollouts):
        columns["advantages"] = advantages
    if metrics := {name: value for name, value in group.metrics.items() if math.isfinite(value)}:
        columns["metrics"] = metrics
    return columns


def group_from_dict(columns: Mapping[str, Any], problem_id: str, *, version: int) -> Group:
    """The group of such columns. `version` is the policy's where the columns do not say which one sampled.

    Sampled tokens without logprobs get NaN. Advantages that came along stay with their rollouts, token by token.
    """
    tokens = columns["tokens"]
    trained = [_trained(columns, i) for i in range(len(tokens))]
    # leading tokens that all siblings have in common, none of them trained
    places = zip(zip(*tokens, strict=False), zip(*trained, strict=False), strict=True)
    alike = sum(1 for _ in takewhile(lambda place: len(set(place[0])) == 1 and not any(place[1]), places))
    shared = min(alike, min(map(len, tokens)) - 1)
    rollouts = (_rollout_from_dict(columns, i, problem_id, trained[i], shared, version) for i in range(len(trained)))
    return Group(problem_id, tuple(rollouts), columns.get("metrics") or {})


def _rollout_from_dict(
    columns: Mapping[str, Any], i: int, problem_id: str, trained: Array, shared: int, version: int
) -> Rollout:
    names = ("reward", "stop", "error", "tool_names", "tool_results", "seconds", "tool_seconds", *_RARE)
    record = {name: _entry(columns, _COLUMNS.get(name, name), i) for name in names}
    record["reward"] = reward = float(record["reward"])
    if _is_overridden(columns, i):
        record["lineages"] = ()
    verdicts = _entry(columns, "verdicts", i)
    scores = {name: _score_from_dict(verdict) for name, verdict in (verdicts or {}).items()}
    if verdicts is None and record["error"] is None:
        scores = {"score": Score(reward, reward >= 1.0)}
    try:  # messages are for the record only
        messages = tuple(map(from_dict, _entry(columns, "messages", i) or ()))
    except (PalestraError, TypeError, AttributeError):
        messages = ()
    row = _entry(columns, "advantages", i)
    return _rollout(
        record,
        problem_id,
        turns=_turns(columns, i, trained, shared, version),
        messages=messages,
        scores=scores,
        advantages=(None if row is None else np.where(trained, np.asarray(row, dtype=np.float32), np.float32(0.0))),
    )


def _turns(columns: Mapping[str, Any], i: int, trained: Array, shared: int, version: int) -> tuple[Turn, ...]:
    ids = np.asarray(columns["tokens"][i], dtype=np.int32)
    row = _entry(columns, "inference_logprobs", i)
    values = np.full(len(ids), np.nan) if row is None else np.asarray(row, dtype=np.float32)
    logprobs = np.where(values > 0, np.nan, values)
    versions = np.asarray(_entry(columns, "versions", i) or np.full(len(ids), version), dtype=np.int32)
    runs = _entry(columns, "turns", i)
    if runs is None or _is_overridden(columns, i):
        runs = [["template", shared]] + [
            ["model" if by_model else "template", len(list(run))] for by_model, run in groupby(trained[shared:])
        ]
    turns, start = [], 0
    for maker, count in runs:
        part = slice(start, start + count)
        if maker == "model":
            turns.append(Turn("model", ids[part], logprobs[part], versions[part]))
        else:
            turns.append(Turn(maker, ids[part]))
        start += count
    if start != len(ids):
        raise InputError(f"the turns of sequence {i} have {start} tokens; the sequence has {len(ids)}")
    return tuple(turns)


def _trained(columns: Mapping[str, Any], i: int) -> Array:
    """[T] bool: which tokens train. The first has nothing before it that could predict it."""
    mask = np.asarray(columns["masks"][i]) != NOT_TRAINED
    mask[:1] = False
    return np.zeros_like(mask) if _is_overridden(columns, i) else mask


def _is_overridden(columns: Mapping[str, Any], i: int) -> bool:
    """Whether the environment asks that this sequence trains nothing."""
    return bool((_entry(columns, "overrides", i) or {}).get("set_advantage_to_zero"))


def _entry(columns: Mapping[str, Any], name: str, i: int) -> Any:
    rows = columns.get(name)
    return rows[i] if rows else None


def _flat(rollout: Rollout, column: Any) -> list[Any]:
    """One column of a rollout, its turns laid end to end."""
    return [value for turn in rollout.turns for value in column(turn).tolist()]


def _known_logprobs(turn: Turn) -> Array:
    values = _or_fill(turn.logprobs, turn, NO_LOGPROB).astype(np.float64)
    return np.where(np.isnan(values), NO_LOGPROB, values)  # JSON has no NaN


def _or_fill(values: Array, turn: Turn, fill: float) -> Array:
    return values if turn.maker == "model" else np.full(len(turn.token_ids), fill)


def _score_from_dict(verdict: Mapping[str, Any]) -> Score:
    return Score(**{**verdict, "turns": tuple(verdict.get("turns", ()))})


def _turn_to_dict(turn: Turn, exact: bool, with_routing: bool = False) -> dict[str, Any]:
    record: dict[str, Any] = {"maker": turn.maker, "token_ids": turn.token_ids.tolist()}
    if turn.maker == "model":
        logprobs = (turn.logprobs if exact else turn.logprobs.astype(np.float64).round(6)).tolist()
        if math.isnan(sum(logprobs)):  # JSON has no NaN
            logprobs = [None if math.isnan(value) else value for value in logprobs]
        record["logprobs"], record["policy_version"] = logprobs, min(turn.versions.tolist(), default=0)
        if exact:
            record |= {"versions": turn.versions.tolist(), "finish": turn.finish}
    if with_routing and turn.routing is not None:
        data = base64.b64encode(zlib.compress(np.ascontiguousarray(turn.routing).tobytes(), 1)).decode()
        record["routing"] = {"dtype": str(turn.routing.dtype), "shape": list(turn.routing.shape), "data": data}
    return record


def _turn_from_dict(record: Mapping[str, Any]) -> Turn:
    ids = record["token_ids"]
    routing = None
    if kept := record.get("routing"):
        data = zlib.decompress(base64.b64decode(kept["data"]))
        routing = np.frombuffer(data, np.dtype(kept["dtype"])).reshape(kept["shape"])
    if record["maker"] != "model":
        return Turn(record["maker"], ids, routing=routing)
    versions = record["versions"] if "versions" in record else record["policy_version"]
    logprobs = record.get("logprobs") or [np.nan] * len(ids)
    return Turn("model", ids, logprobs, versions, record.get("finish"), routing)  # type: ignore[arg-type]


def _lineage_to_dict(lineage: Lineage, exact: bool, with_routing: bool = False) -> dict[str, Any]:
    turns = [_turn_to_dict(turn, exact, with_routing) for turn in lineage.turns]
    record = {"stop": lineage.stop, "turns": turns, "messages": [_message_fields(m) for m in lineage.messages]}
    return record | ({"role": lineage.role} if lineage.role else {})


def _lineage_from_dict(record: Mapping[str, Any]) -> Lineage:
    turns, messages = map(_turn_from_dict, record["turns"]), map(_message_from_fields, record["messages"])
    return Lineage(tuple(turns), tuple(messages), record["stop"], record.get("role", ""))


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
