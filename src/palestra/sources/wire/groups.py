"""Groups that come over the wire and groups that go out on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.group_codec import group_from_dict, group_to_dict
from palestra.core.types import Group
from palestra.sources.wire.types import MAX_VALUE

_UNUSED = ("ref_logprobs", "distill_token_ids", "distill_logprobs", "images", "generation_params", "group_overrides")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model can take."""

    vocabulary: int
    context_tokens: int


def read_group(columns: Mapping[str, Any], name: str, limits: ModelLimits, policy_version: int) -> Group:
    """The group of columns that were posted; PalestraError where the model cannot take them."""
    _check(columns["tokens"], limits)
    _check_values("scores", columns["scores"])
    for row in columns.get("advantages") or ():
        _check_values("advantages", row)
    return group_from_dict(columns, name, version=policy_version)


def unused_columns(columns: Mapping[str, Any]) -> set[str]:
    """Columns of the protocol that the environment filled in, and that our trainer does not read."""
    return {name for name in _UNUSED if columns.get(name)}


def write_group(group: Group, env_id: int, mask_truncated: bool) -> dict[str, Any]:
    """The group as it is posted.

    A failed attempt trains nothing, but groups must keep their size: for trainers that do not read `errors`, its
    score is the mean of the others, which leaves their baseline as it is.
    """
    rewards = [r.reward for r in group.rollouts if r.error is None]
    mean = sum(rewards) / len(rewards)
    columns = group_to_dict(group, mask_truncated=mask_truncated)
    columns["scores"] = [mean if r.error is not None else r.reward for r in group.rollouts]
    return columns | {"env_id": env_id}


def _check(tokens: Sequence[Sequence[int]], limits: ModelLimits) -> None:
    longest, largest = max(map(len, tokens)), max(map(max, tokens))
    if longest > limits.context_tokens:
        raise PalestraError(f"a sequence has {longest} tokens; the model holds {limits.context_tokens}")
    if largest >= limits.vocabulary:
        raise PalestraError(f"token id {largest} is outside of the vocabulary of {limits.vocabulary}")


def _check_values(name: str, values: Sequence[float]) -> None:
    wrong = next((value for value in values if not abs(value) <= MAX_VALUE), None)  # also for NaN
    if wrong is not None:
        raise PalestraError(f"{name} has {wrong}; expected numbers up to {MAX_VALUE:g}, which float32 can compute with")
