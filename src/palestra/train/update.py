"""One training step's update of the policy: minibatches, iterations and losses, by the learner's primitives.

Also how many steps a run has, and what changes from step to step: learning rate, ECHO and entropy coefficients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from palestra.algo.batch import Batch
from palestra.algo.losses import LossFunction, Objective
from palestra.algo.step_loss import StepLoss, coefficient_at
from palestra.core.config import RunConfig
from palestra.core.config_sections import FULL_LEARNING_RATE, TrainSection
from palestra.core.errors import InputError, SettingError, UserCodeError
from palestra.core.types import Array, Group
from palestra.learner.base import Learner, Outputs, noop
from palestra.train.batch import to_batch

# These reductions divide by the tokens of the whole batch of rollouts, however many steps it is split into.
BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")
SUMS = ("loss", "tokens_computed")
SAMPLER_METRICS = ("kl_sampler", "sampler_gap_mean", "sampler_gap_max")
_POLICY_TOKENS = attrgetter("policy_tokens")
MIN_STEPS = 40  # of a run whose length is not given


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The numbers of one step."""

    learning_rate: float
    echo: float
    entropy: float


def update(
    learner: Learner,
    batch: Batch,
    config: RunConfig,
    coefficients: Coefficients,
    version: int,
    record: TokenRecord | None = None,
    host_work: Callable[[], None] = noop,
    distill: Any = None,
    custom_loss: LossFunction | None = None,
) -> dict[str, float]:
    """`iterations` passes of `minibatches` optimizer steps each; `version` is that of the learner's weights.

    `record` collects the results for each token; `host_work` is called once, while the first step is computed.
    `custom_loss` takes the place of the formula of `train.loss`.
    `distill` has the rows that are also learned from a teacher (extras/distill); the batch may have no rows then.
    """
    started, train = time.perf_counter(), config.train
    distilled = [] if distill is None else distill.parts(learner)
    if not batch.rows and not distilled:
        raise InputError("the batch has no rows; give the learner at least one group")
    if len(bad := np.flatnonzero(~np.isfinite(batch.advantages))):
        group = batch.groups[batch.row_of(bad[0])]
        raise UserCodeError(f"group {group}: an advantage is not finite; look for a measure that returns NaN")
    parts = batch.minibatches(train.minibatches) if batch.rows else []
    first_rows = np.cumsum([0, *map(attrgetter("rows"), parts)])
    losses = step_losses(parts, config, coefficients, custom_loss)
    if train.beta > 0:
        for part in parts:
            part.ref_logprobs = learner.forward(part, reference=True)
    for part in parts:
        part.old_logprobs = behaviour_logprobs(learner, part, version, several=len(parts) > 1)
    updates: list[dict[str, float]] = []
    for _ in range(train.iterations):
        for i in range(max(len(parts), len(distilled))):
            trains = i < len(parts) and (losses[i].policy_tokens or losses[i].echo_tokens)
            outputs = learner.forward_backward(parts[i], losses[i]) if trains else None
            added = learner.forward_backward(*distilled[i]) if i < len(distilled) else None
            if outputs is None and added is None:
                continue
            norm = learner.optim_step(
                coefficients.learning_rate, max_grad_norm=train.max_grad_norm, host_work=noop if updates else host_work
            )
            known = {} if math.isnan(norm) else {"grad_norm": norm}  # a server may not report it
            metrics = {} if outputs is None else outputs.metrics()
            if added is not None:  # the gradients of both losses make one step: these of their metrics add up
                taught = added.metrics()
                sums = {name: metrics.get(name, 0.0) + taught[name] for name in SUMS if name in taught}
                metrics = metrics | taught | sums
            updates.append(metrics | known)
            if outputs is not None and record is not None:
                record.add(first_rows[i], parts[i], outputs)
            if outputs is not None and train.iterations > 1 and len(updates) <= len(parts):
                own, old = outputs.logprobs(), parts[i].old_logprobs  # the next passes compare with those of the first
                parts[i].old_logprobs = own if old is None else np.where(np.isnan(old), own, old)
    seconds = time.perf_counter() - started
    metrics = combine(updates, train.iterations) if updates else {"loss": 0.0}
    if not bool(np.isfinite(batch.logprobs[batch.policy_mask]).any()):  # then these compare the policy with itself
        metrics = {name: value for name, value in metrics.items() if name not in SAMPLER_METRICS}
    computed = metrics.get("tokens_computed", 0.0)
    return metrics | {
        "learning_rate": coefficients.learning_rate,
        "tokens_trained": float(sum(map(_POLICY_TOKENS, losses))),
        "train_tokens_per_s": computed * train.iterations / seconds,
        "train_seconds": seconds,
    }


def step_losses(
    batches: Sequence[Batch], config: RunConfig, coefficients: Coefficients, custom_loss: LossFunction | None = None
) -> list[StepLoss]:
    """The loss of each optimizer step."""
    loss_of: Any = partial(
        StepLoss.of,
        objective=objective_of(config, custom_loss),
        max_completion_length=config.rollout.max_new_tokens,
        entropy_coefficient=coefficients.entropy,
        echo_coefficient=coefficients.echo,
        echo_normalization=config.echo.normalization,
    )
    losses = list(map(loss_of, batches))
    if config.train.loss not in BATCH_TOKEN_LOSSES or len(losses) < 2:
        return losses
    mean = sum(map(_POLICY_TOKENS, losses)) / len(losses)
    return [replace(loss, tokens_total=mean) for loss in losses]


def behaviour_logprobs(learner: Learner, batch: Batch, version: int, *, several: bool) -> Array | None:
    """[T] the sampler's where an older policy sampled the token, else the current policy's own.

    The current policy's are computed only where an update of this step would change them before they are read.
    """
    stale = batch.policy_mask & (batch.versions != version) & ~np.isnan(batch.logprobs)
    if several:
        own = learner.forward(batch)
    elif stale.any():
        own = np.full(len(stale), np.nan, dtype=np.float32)
    else:
        return None
    return np.where(stale, batch.logprobs, own)


def objective_of(config: RunConfig, custom: LossFunction | None = None) -> Objective:
    """The policy loss of a config, with the user's formula if there is one."""
    train = config.train
    correction: Any = config.importance_correction
    return Objective(
        loss=train.loss,
        ratio=train.ratio,
        epsilon=train.epsilon,
        epsilon_high=train.epsilon_high,
        delta=train.delta,
        sapo_temperature_pos=train.sapo_temperature_pos,
        sapo_temperature_neg=train.sapo_temperature_neg,
        beta=train.beta,
        kl_bias_correction=train.kl_bias_correction,
        importance_correction=correction,
        importance_cap=train.importance_cap,
        importance_floor=train.importance_floor,
        off_policy_mask_threshold=train.off_policy_mask_threshold,
        custom=custom,
    )


def combine(updates: Sequence[dict[str, float]], iterations: int) -> dict[str, float]:
    """Each metric over the optimizer steps that report it: maxima stay maxima, tokens add up, the rest are means."""
    columns: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            columns.setdefault(name, []).append(value)
    combined: dict[str, float] = {}
    for name, column in columns.items():
        if name.endswith("_max") or name == "peak_memory_gib":
            combined[name] = max(column)
        else:
            combined[name] = sum(column) / (iterations if name.startswith("tokens_") else len(column))
    return combined


TOKEN_COLUMNS = np.dtype(
    [
        ("policy_mask", "?"),  # trained in the policy loss
        ("logprob", "<f4"),  # the sampler's; NaN where the model did not make the token, as below
        ("learner_logprob", "<f4"),  # before the step's first update of it; NaN where nothing was learned
        ("ratio", "<f4"),  # of the last update: new policy over old
        ("entropy", "<f4"),  # of the learner's distribution
        ("advantage", "<f4"),
    ]
)


class TokenRecord:
    """Collects the learner's per-token results of one step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        unknown = np.full(len(batch.token_ids), np.nan, np.float32)
        self._columns = {"learner_logprob": unknown, "ratio": unknown.copy(), "entropy": unknown.copy()}
        self._added: set[int] = set()

    def add(self, first_row: int, batch: Batch, outputs: Outputs) -> None:
        """The results of one forward_backward on rows from `first_row` on; of several passes, the last ratio counts."""
        start = int(self._batch.offsets[first_row])
        tokens = slice(start, start + len(batch.token_ids))
        now = outputs.logprobs()
        before = now if batch.old_logprobs is None else batch.old_logprobs
        self._columns["ratio"][tokens] = np.exp(now - np.where(np.isnan(before), now, before))
        if start not in self._added:
            self._added.add(start)
            self._columns["learner_logprob"][tokens] = now
            self._columns["entropy"][tokens] = outputs.entropies()

    def table(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Array:
        """[T] `TOKEN_COLUMNS` of all tokens of the step, trained or not."""
        step = to_batch(groups, advantages, everything=True)
        table = np.zeros(len(step.token_ids), TOKEN_COLUMNS)
        table["logprob"] = np.where(step.policy_mask, step.logprobs, np.nan)
        table["advantage"] = np.where(step.policy_mask, step.advantages, np.nan)
        is_row = np.zeros(step.rows, np.bool_)
        is_row[self._batch.conversations] = True
        places, mask = np.repeat(is_row, step.lengths), self._batch.policy_mask
        table["policy_mask"][places] = mask
        for name, column in self._columns.items():
            table[name] = np.nan
            table[name][places] = np.where(mask, column, np.nan)
        return table


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
