"""Groups as the columns of the wire, and back. What a foreign environment leaves out is derived from its masks.

A column has one entry for each rollout: `tokens`, `masks` (the id where the model made the token, -100 elsewhere),
`inference_logprobs`, `scores` (the rewards), `messages`, and `advantages` where rollouts have their own. Our own
columns say the rest: `turns` ([maker, token count] pairs), `versions`, `stops`, `errors`, `verdicts`, `tool_names`,
`tool_results`, `seconds`, `tool_seconds`; where there are any, `lineages`, `states`, `info` and `roles` of each rollout
and `metrics` of the group.

>>> columns = {"tokens": [[1, 2, 7], [1, 2, 8]], "masks": [[-100, -100, 7], [-100, -100, 8]], "scores": [1.0, 0.0]}
>>> group = group_from_dict(columns, "g", version=3)
>>> [(turn.maker, turn.token_ids.tolist()) for turn in group.rollouts[0].turns]
[('template', [1, 2]), ('model', [7])]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import groupby, takewhile
from typing import Any

import numpy as np

from palestra.core.errors import InputError, PalestraError
from palestra.core.group_codec import NOT_TRAINED, outcome_fields, rollout_from_dict
from palestra.core.messages import from_dict, to_dict
from palestra.core.types import Array, Group, Rollout, Score, Turn

NO_LOGPROB = 1.0  # what clients of the wire fill in; no sampled token can have it

# columns of a group whose names differ from those of a rollout's line
COLUMN_NAMES = {"reward": "scores", "scores": "verdicts", "stop": "stops", "error": "errors", "role": "roles"}


def group_to_dict(group: Group, *, mask_truncated: bool = False) -> dict[str, Any]:
    """The columns of a group. `mask_truncated` leaves rollouts that were cut off out of `masks`."""
    rollouts = group.rollouts
    masked = [r.error is not None or (mask_truncated and r.cut_off) for r in rollouts]
    known = outcome_fields(exact=True)
    outcomes = [known.to_dict(rollout) for rollout in rollouts]
    columns: dict[str, Any] = {"problem_id": group.problem_id}
    for key in {key: None for outcome in outcomes for key in outcome}:
        columns[COLUMN_NAMES.get(key, key)] = [outcome.get(key, known.defaults.get(key)) for outcome in outcomes]
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


def _flat(rollout: Rollout, column: Any) -> list[Any]:
    """One column of a rollout, its turns laid end to end."""
    return [value for turn in rollout.turns for value in column(turn).tolist()]


def _known_logprobs(turn: Turn) -> Array:
    values = _or_fill(turn.logprobs, turn, NO_LOGPROB).astype(np.float64)
    return np.where(np.isnan(values), NO_LOGPROB, values)  # JSON has no NaN


def _or_fill(values: Array, turn: Turn, fill: float) -> Array:
    return values if turn.maker == "model" else np.full(len(turn.token_ids), fill)


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
    names = [f.name for f in fields(Rollout) if f.name != "problem_id"]
    entries = {name: _entry(columns, COLUMN_NAMES.get(name, name), i) for name in names}
    record = {name: entry for name, entry in entries.items() if entry is not None}
    record["reward"] = reward = float(record["reward"])
    if _is_overridden(columns, i):
        record["lineages"] = ()
    parts: dict[str, Any] = {"problem_id": problem_id, "turns": _turns(columns, i, trained, shared, version)}
    if "scores" not in record:
        parts["scores"] = {} if "error" in record else {"score": Score(reward, reward >= 1.0)}
    try:  # messages are for the record only
        parts["messages"] = tuple(map(from_dict, record.get("messages") or ()))
    except (PalestraError, TypeError, AttributeError):
        parts["messages"] = ()
    if (row := record.get("advantages")) is not None:
        parts["advantages"] = np.where(trained, np.asarray(row, dtype=np.float32), np.float32(0.0))
    return rollout_from_dict(record, **parts)


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
