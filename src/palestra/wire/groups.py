"""A scored group as it comes over the wire <-> a Group of rollouts, with its advantages where they were given.

>>> plain = {"tokens": [[1, 2, 7], [1, 2, 8]], "masks": [[-100, -100, 7], [-100, -100, 8]], "scores": [1.0, 0.0]}
>>> group, given = read_group(plain, "g", Limits(vocabulary=9, context_tokens=4), policy_version=3)
>>> [(turn.maker, turn.token_ids) for turn in group.rollouts[0].turns], given
([('template', (1, 2)), ('model', (7,))], None)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.messages import from_dict, to_dict
from palestra.core.types import Group, Message, Rollout, Score, Turn

NOT_TRAINED = -100
_NO_LOGPROB = 1.0  # no sampled token can have it
_MAX_ADVANTAGES = 32  # different ones in one sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take."""

    vocabulary: int
    context_tokens: int


def read_group(
    plain: Mapping[str, Any], name: str, limits: Limits, policy_version: int
) -> tuple[Group, list[float] | None]:
    """The group, and one advantage for each rollout if the environment gave them.

    A sequence whose tokens have several advantages becomes several rollouts of the same tokens, each of which
    trains the tokens of one advantage. Sampled tokens without logprobs get NaN, for the learner to compute.
    """
    tokens: list[list[int]] = plain["tokens"]
    _check(tokens, limits)
    trained = [_trained(plain, i) for i in range(len(tokens))]
    shared = _shared_prompt(tokens, trained)
    rollouts: list[Rollout] = []
    given: list[float] = []
    for i, row in enumerate(tokens):
        logprobs = _logprobs(plain, i, trained[i])
        for advantage, mask in _parts(plain, i, trained[i]):
            rollouts.append(
                Rollout(
                    problem_id=name,
                    turns=tuple(_turns(row, mask, logprobs, shared, policy_version)),
                    messages=_messages(plain, i),
                    stop="answered",
                    scores={"score": Score(plain["scores"][i], plain["scores"][i] >= 1.0)},
                    reward=plain["scores"][i],
                )
            )
            given.append(advantage)
    return Group(name, tuple(rollouts)), given if plain.get("advantages") else None


def write_group(group: Group, env_id: int, mask_truncated: bool) -> dict[str, Any]:
    """The group as it goes over the wire: what `read_group` reads.

    A failed attempt has no place there, but groups must keep their size: it trains nothing, and its score is
    the mean of the others, which leaves their baseline as it is.
    """
    whole = [r.reward for r in group.rollouts if r.error is None]
    mean = sum(whole) / len(whole)
    silent = [r.error is not None or (mask_truncated and r.stop == "truncated") for r in group.rollouts]
    return {
        "tokens": [[i for turn in r.turns for i in turn.token_ids] for r in group.rollouts],
        "masks": [
            [i if turn.maker == "model" and not quiet else NOT_TRAINED for turn in r.turns for i in turn.token_ids]
            for r, quiet in zip(group.rollouts, silent, strict=True)
        ],
        "scores": [mean if r.error is not None else r.reward for r in group.rollouts],
        "inference_logprobs": [
            [p for turn in r.turns for p in (turn.logprobs or (_NO_LOGPROB,) * len(turn.token_ids))]
            for r in group.rollouts
        ],
        "messages": [[to_dict(message, arguments_as_text=True) for message in r.messages] for r in group.rollouts],
        "env_id": env_id,
    }


def _check(tokens: Sequence[Sequence[int]], limits: Limits) -> None:
    longest, largest = max(map(len, tokens)), max(map(max, tokens))
    if longest > limits.context_tokens:
        raise PalestraError(f"a sequence has {longest} tokens; the model holds {limits.context_tokens}")
    if largest >= limits.vocabulary:
        raise PalestraError(f"token id {largest} is outside of the vocabulary of {limits.vocabulary}")


def _trained(plain: Mapping[str, Any], i: int) -> list[bool]:
    """Which tokens train. The first has nothing before it that could predict it."""
    if (plain.get("overrides") or [{}] * (i + 1))[i].get("set_advantage_to_zero"):
        return [False] * len(plain["masks"][i])
    return [False] + [mask != NOT_TRAINED for mask in plain["masks"][i][1:]]


def _shared_prompt(tokens: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]]) -> int:
    """How many leading tokens all siblings have in common, none of them trained."""
    columns = zip(zip(*tokens, strict=False), zip(*trained, strict=False), strict=True)
    alike = sum(1 for _ in takewhile(lambda column: len(set(column[0])) == 1 and not any(column[1]), columns))
    return min(alike, min(map(len, tokens)) - 1)


def _parts(plain: Mapping[str, Any], i: int, trained: Sequence[bool]) -> list[tuple[float, Sequence[bool]]]:
    """(advantage, the tokens that have it); without given advantages one part with all."""
    if not plain.get("advantages"):
        return [(0.0, trained)]
    row = plain["advantages"][i]
    values = sorted({value for value, counts in zip(row, trained, strict=True) if counts})
    if len(values) > _MAX_ADVANTAGES:
        raise PalestraError(
            f"sequence {i} has {len(values)} different advantages; up to {_MAX_ADVANTAGES} can be trained, "
            "such as one a turn"
        )
    if not values:
        return [(0.0, trained)]
    return [(v, [counts and a == v for a, counts in zip(row, trained, strict=True)]) for v in values]


def _logprobs(plain: Mapping[str, Any], i: int, trained: Sequence[bool]) -> list[float]:
    """The sampler's logprobs; NaN everywhere if one of a trained token is missing (clients fill in 1.0)."""
    rows = plain.get("inference_logprobs")
    if not rows or any(value > 0 for value, counts in zip(rows[i], trained, strict=True) if counts):
        return [math.nan] * len(trained)
    return list(rows[i])


def _turns(
    row: Sequence[int], mask: Sequence[bool], logprobs: Sequence[float], shared: int, version: int
) -> list[Turn]:
    turns = [Turn("template", tuple(row[:shared]))]
    at = shared
    for by_model, run in groupby(mask[shared:]):
        end = at + len(list(run))
        ids = tuple(row[at:end])
        if by_model:
            turns.append(Turn("model", ids, tuple(logprobs[at:end]), version))
        else:
            turns.append(Turn("template", ids))
        at = end
    return turns


def _messages(plain: Mapping[str, Any], i: int) -> tuple[Message, ...]:
    """For the record only, so what cannot be read is left out."""
    try:
        return tuple(from_dict(message) for message in (plain.get("messages") or {i: ()})[i])
    except (PalestraError, TypeError, AttributeError):
        return ()
