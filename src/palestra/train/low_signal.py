"""How large an update a step may make when few of its groups have signal.

AdamW divides the gradient by its own running scale, so a step with one lucky group changes every weight as much as a
step with signal in all groups. Such steps once destroyed a model within ten steps. `train.low_signal` chooses the
remedy: `scale` lowers the learning rate of the step, `accumulate` keeps the groups until enough have come together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.core.config_sections import TrainSection
from palestra.core.group_codec import group_from_record, group_to_record
from palestra.core.types import Group
from palestra.train.samples import has_signal

MAX_ACCUMULATED_STEPS = 8  # after which pending groups are applied, scaled if there are still too few


@dataclass(frozen=True, slots=True)
class PendingGroups:
    """Groups with signal of earlier steps that wait for more. The weights have not changed since they were sampled."""

    groups: tuple[Group, ...] = ()
    steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"groups": [group_to_record(group) for group in self.groups], "steps": self.steps}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> PendingGroups:
        return cls(tuple(group_from_record(group) for group in record["groups"]), record["steps"])


NO_GROUPS = PendingGroups()


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """The groups a step trains on, none if it waits for more, and the factor of its learning rate."""

    groups: Sequence[Group]
    scale: float
    pending: PendingGroups = NO_GROUPS


def plan_update(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    pending: PendingGroups,
    train: TrainSection,
    *,
    problems: int,
    is_last: bool,
) -> UpdatePlan:
    """Choose the groups and the scale of a step's update. `problems` is the number that a full step has.

    Pending groups come after the step's own. The last step applies what is pending.
    """
    if train.low_signal == "off":
        return UpdatePlan(groups, 1.0)
    with_signal = tuple(group for group, row in zip(groups, advantages, strict=True) if has_signal(group, row))
    if train.low_signal == "scale":
        return UpdatePlan(groups, update_scale(len(with_signal), problems, train.full_update_share))
    scale = update_scale(len(with_signal) + len(pending.groups), problems, train.full_update_share)
    steps = pending.steps + 1 if pending.groups or with_signal else 0
    if scale == 1.0 or is_last or steps >= MAX_ACCUMULATED_STEPS:
        return UpdatePlan((*groups, *pending.groups), scale)
    return UpdatePlan((), 0.0, PendingGroups((*pending.groups, *with_signal), steps))


def update_scale(signal_groups: int, problems: int, full_update_share: float) -> float:
    """Factor of the learning rate: 1 from `full_update_share` of the problems on, proportionally less below.

    >>> update_scale(8, 32, 1 / 4), update_scale(1, 32, 1 / 4), update_scale(1, 4, 1 / 4), update_scale(0, 4, 1 / 4)
    (1.0, 0.125, 1.0, 0.0)
    """
    return min(1.0, signal_groups / (full_update_share * problems))
