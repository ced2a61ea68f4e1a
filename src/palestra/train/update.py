"""One training step's update of the policy: minibatches, iterations and losses, by the learner's primitives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from palestra.algo.batch import Batch
from palestra.algo.losses import LossFunction, Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.errors import InputError, UserCodeError
from palestra.core.types import Array, Group
from palestra.learner.base import Learner, Outputs, noop
from palestra.train.batch import as_rows, conversations_of
from palestra.train.distill import DistillRows
from palestra.train.schedule import Coefficients

# These reductions divide by the tokens of the whole batch of rollouts, however many steps it is split into.
BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")
SUMS = ("loss", "tokens_computed")
SAMPLER_METRICS = ("kl_sampler", "sampler_gap_mean", "sampler_gap_max")


def update(
    learner: Learner,
    batch: Batch,
    config: RunConfig,
    coefficients: Coefficients,
    version: int,
    record: TokenRecord | None = None,
    host_work: Callable[[], None] = noop,
    distill: DistillRows | None = None,
    custom_loss: LossFunction | None = None,
) -> dict[str, float]:
    """`iterations` passes of `minibatches` optimizer steps each; `version` is that of the learner's weights.

    `record` collects the results for each token; `host_work` is called once, while the first step is computed.
    `custom_loss` takes the place of the formula of `train.loss`.
    `distill` is what is also learned from a teacher; the batch may have no rows then.
    """
    started, train = time.perf_counter(), config.train
    distilled = [] if distill is None else distill.parts(learner)
    if not batch.rows and not distilled:
        raise InputError("the batch has no rows; give the learner at least one group")
    if len(bad := np.flatnonzero(~np.isfinite(batch.advantages))):
        group = batch.groups[batch.row_of(bad[0])]
        raise UserCodeError(f"group {group}: an advantage is not finite; look for a measure that returns NaN")
    parts = batch.minibatches(train.minibatches) if batch.rows else []
    first_rows = np.cumsum([0, *(part.rows for part in parts)])
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
        "tokens_trained": float(sum(loss.policy_tokens for loss in losses)),
        "train_tokens_per_s": computed * train.iterations / seconds,
        "train_seconds": seconds,
    }


def step_losses(
    batches: Sequence[Batch], config: RunConfig, coefficients: Coefficients, custom_loss: LossFunction | None = None
) -> list[StepLoss]:
    """The loss of each optimizer step."""
    objective = replace(objective_of(config), custom=custom_loss)
    options: dict[str, Any] = {
        "max_completion_length": config.rollout.max_new_tokens,
        "entropy_coefficient": coefficients.entropy,
        "echo_coefficient": coefficients.echo,
        "echo_normalization": config.echo.normalization,
    }
    losses = [StepLoss.of(batch, objective, **options) for batch in batches]
    if config.train.loss not in BATCH_TOKEN_LOSSES or not losses:
        return losses
    mean = sum(loss.policy_tokens for loss in losses) / len(losses)
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


def objective_of(config: RunConfig) -> Objective:
    settings = {f.name: getattr(config.train, f.name) for f in fields(Objective) if f.name != "custom"}
    return Objective(**settings | {"importance_correction": config.importance_correction})


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
        step = as_rows(conversations_of(groups, advantages))
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
