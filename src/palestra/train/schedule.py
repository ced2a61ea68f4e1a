"""How many steps a run has, and what changes from step to step: learning rate, ECHO and entropy coefficients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palestra.algo.step_loss import coefficient_at, next_entropy_coefficient
from palestra.core.config import RunConfig
from palestra.core.config_sections import FULL_LEARNING_RATE, TrainSection
from palestra.core.errors import SettingError

MIN_STEPS = 40  # of a run whose length is not given


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The numbers of one step."""

    learning_rate: float
    echo: float
    entropy: float


def coefficients_at(step: int, config: RunConfig, total_steps: int | None, entropy: float) -> Coefficients:
    """The coefficients of a step counted from 0; `entropy` is what the controller has come to."""
    echo = coefficient_at(
        step,
        schedule=config.echo.schedule,
        initial=config.echo.coefficient,
        final=config.echo.final_coefficient,
        steps_total=total_steps,
        step_every=config.echo.step_every,
    )
    return Coefficients(learning_rate_at(step, config.train, total_steps), echo, entropy)


def next_entropy(coefficient: float, metrics: dict[str, float], train: TrainSection) -> float:
    """The controller's next coefficient, where a target is set and the step measured the entropy."""
    if train.target_entropy is None or "entropy" not in metrics:
        return coefficient
    return next_entropy_coefficient(coefficient, metrics["entropy"], train.target_entropy)


def learning_rate_at(step: int, train: TrainSection, total_steps: int | None) -> float:
    """The learning rate of a step counted from 0: warm-up, then the schedule, which ends at 0."""
    highest = train.learning_rate or FULL_LEARNING_RATE  # a run suits it to its model
    if step < train.warmup_steps:
        return highest * (step + 1) / train.warmup_steps
    if train.scheduler == "constant":
        return highest
    if total_steps is None:
        raise SettingError(f"a {train.scheduler} schedule needs the number of steps; set train.max_steps")
    done = min((step - train.warmup_steps) / max(total_steps - train.warmup_steps, 1), 1.0)
    factor = 1.0 - done if train.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return highest * factor


def total_steps(config: RunConfig, problems: int | None) -> int:
    """Optimizer steps in the whole run: `max_steps`, or enough for all epochs; with neither, one epoch or MIN_STEPS."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    if problems is None:
        raise SettingError("these environments have no last problem; say when to stop with train.max_steps")
    per_epoch = math.ceil(problems / config.train.problems_per_step)
    return max(MIN_STEPS, per_epoch) if config.train.epochs is None else config.train.epochs * per_epoch


def solved_reason(history: Sequence[Mapping[str, float]], step: int, total: int, count: int) -> str | None:
    """Why a run ends early: all rollouts of its last `count` steps passed; None if not, or if `count` is 0."""
    recent = history[-count:] if count else []
    if not recent or len(recent) < count or any(row.get("pass_rate") != 1.0 for row in recent):
        return None
    ended = f"the training ended after step {step} of {total} (train.stop_when_solved={count})"
    return f"every rollout of the last {count} steps passed, so {ended}"


def token_limit_reason(sampled: int, step: int, limit: int | None) -> str | None:
    """Why a run ends early: it has sampled as many tokens as it may."""
    if limit is None or sampled < limit:
        return None
    return f"{sampled:,} tokens are sampled, so the training ended after step {step} (train.max_sampled_tokens={limit})"


def update_scale(signal_groups: int, solved_groups: int, problems: int, full_update_share: float) -> float:
    """Return the factor of a step's learning rate: 1 if enough of its groups have signal or are solved, else less.

    AdamW divides the gradient by its own running scale, so a step with one lucky group would change every weight as
    much as a step with signal in all groups; such steps destroyed a 1.5B model within ten steps. Where every rollout
    of other groups passed, a single group is no luck: a model that solves nine problems in ten learns the tenth from
    few groups, and only with full updates.

    >>> [update_scale(signal, 0, 32, 1 / 4) for signal in (0, 1, 4, 8)]
    [0.0, 0.125, 0.5, 1.0]
    >>> update_scale(1, 60, 64, 1 / 4)
    1.0
    """
    if not full_update_share:
        return 1.0
    if not signal_groups:
        return 0.0
    return min(1.0, (signal_groups + solved_groups) / (full_update_share * problems))
