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
from collections.abc import Mapping, Sequence
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
_READ = {f.name: COLUMN_NAMES.get(f.name, f.name) for f in fields(Rollout) if f.name != "problem_id"}
_READ |= {name: name for name in ("tokens", "masks", "inference_logprobs", "versions", "overrides")}


def group_to_dict(group: Group, *, mask_truncated: bool = False) -> dict[str, Any]:
    """The columns of a group. `mask_truncated` leaves rollouts that were cut off out of `masks`."""
    rollouts = group.rollouts
    masked = [r.error is not None or (mask_truncated and r.cut_off) for r in rollouts]
    known = outcome_fields(exact=True)
    outcomes = [known.to_dict(rollout) for rollout in rollouts]
    columns: dict[str, Any] = {"problem_id": group.problem_id}
    for key in {key: None for outcome in outcomes for key in outcome}:
        columns[COLUMN_NAMES.get(key, key)] = [outcome.get(key, known.defaults.get(key)) for outcome in outcomes]
    masks = _column(rollouts, "token_ids", NOT_TRAINED)
    logprobs = _column(rollouts, "logprobs", NO_LOGPROB)
    columns |= {
        "messages": [[to_dict(m, arguments_as_text=True) for m in r.messages] for r in rollouts],
        "tokens": [[token for turn in r.turns for token in turn.token_ids.tolist()] for r in rollouts],
        "masks": [[NOT_TRAINED] * len(mask) if m else mask for mask, m in zip(masks, masked, strict=True)],
        # JSON has no NaN
        "inference_logprobs": [[NO_LOGPROB if math.isnan(value) else value for value in row] for row in logprobs],
        "versions": _column(rollouts, "versions", 0),
        "turns": [[[turn.maker, len(turn.token_ids)] for turn in r.turns] for r in rollouts],
    }
    advantages = [r.advantages.tolist() for r in rollouts if r.advantages is not None]
    if len(advantages) == len(rollouts):
        columns["advantages"] = advantages
    if metrics := {name: value for name, value in group.metrics.items() if math.isfinite(value)}:
        columns["metrics"] = metrics
    return columns


def _column(rollouts: Sequence[Rollout], name: str, fill: float) -> list[list[Any]]:
    """A column of `Turn` for each rollout, its turns laid end to end; `fill` where the model did not make the token."""

    def values(turn: Turn) -> list[Any]:
        return getattr(turn, name).tolist() if turn.maker == "model" else [fill] * len(turn.token_ids)

    return [[value for turn in rollout.turns for value in values(turn)] for rollout in rollouts]


def group_from_dict(columns: Mapping[str, Any], problem_id: str, *, version: int) -> Group:
    """The group of such columns. `version` is the policy's where the columns do not say which one sampled.

    Sampled tokens without logprobs get NaN. Advantages that came along stay with their rollouts, token by token.
    """
    tokens = columns["tokens"]
    given = {name: values for name, column in _READ.items() if (values := columns.get(column))}
    rows = [
        {"sequence": i} | {name: values[i] for name, values in given.items() if values[i] is not None}
        for i in range(len(tokens))
    ]
    trained = [_trained(row) for row in rows]
    # leading tokens that all siblings have in common, none of them trained
    places = zip(zip(*tokens, strict=False), zip(*trained, strict=False), strict=True)
    alike = sum(1 for _ in takewhile(lambda place: len(set(place[0])) == 1 and not any(place[1]), places))
    shared = min(alike, min(map(len, tokens)) - 1)
    rollouts = [_rollout(row, problem_id, trains, shared, version) for row, trains in zip(rows, trained, strict=True)]
    return Group(problem_id, tuple(rollouts), columns.get("metrics") or {})


def _rollout(row: Mapping[str, Any], problem_id: str, trained: Array, shared: int, version: int) -> Rollout:
    reward = float(row["reward"])
    parts: dict[str, Any] = {"problem_id": problem_id, "reward": reward}
    parts["turns"] = _turns(row, trained, shared, version)
    if _is_overridden(row):
        parts["lineages"] = ()
    if "scores" not in row:
        parts["scores"] = {} if "error" in row else {"score": Score(reward, reward >= 1.0)}
    try:  # messages are for the record only
        parts["messages"] = tuple(map(from_dict, row.get("messages") or ()))
    except (PalestraError, TypeError, AttributeError):
        parts["messages"] = ()
    if "advantages" in row:
        parts["advantages"] = np.where(trained, np.asarray(row["advantages"], dtype=np.float32), np.float32(0.0))
    return rollout_from_dict(row, **parts)


def _turns(row: Mapping[str, Any], trained: Array, shared: int, version: int) -> tuple[Turn, ...]:
    ids = np.asarray(row["tokens"], dtype=np.int32)
    values = np.asarray(row.get("inference_logprobs", np.full(len(ids), np.nan)), dtype=np.float32)
    logprobs = np.where(values > 0, np.nan, values)
    versions = np.asarray(row.get("versions", np.full(len(ids), version)), dtype=np.int32)
    runs: Any = row.get("turns")
    if runs is None or _is_overridden(row):
        makers = (("model" if by_model else "template", list(run)) for by_model, run in groupby(trained[shared:]))
        runs = [("template", shared), *((maker, len(run)) for maker, run in makers)]
    turns, start = [], 0
    for maker, count in runs:
        part = slice(start, start + count)
        turns.append(Turn(maker, ids[part], *((logprobs[part], versions[part]) if maker == "model" else ())))
        start += count
    if start != len(ids):
        raise InputError(f"the turns of sequence {row['sequence']} have {start} tokens; the sequence has {len(ids)}")
    return tuple(turns)


def _trained(row: Mapping[str, Any]) -> Array:
    """[T] bool: which tokens train. The first has nothing before it that could predict it."""
    mask = np.asarray(row["masks"]) != NOT_TRAINED
    mask[:1] = False
    return np.zeros_like(mask) if _is_overridden(row) else mask


def _is_overridden(row: Mapping[str, Any]) -> bool:
    """Whether the environment asks that this sequence trains nothing."""
    return bool((row.get("overrides") or {}).get("set_advantage_to_zero"))
