"""The policy objectives, on flat tensors of trained tokens: no padding, no masks, no model.

A micro-batch is N trained tokens of R rows. `row[i]` says which row token i belongs to; a row's
tokens must all be in one micro-batch, and a row may have none (truncated, or only tool output):
it then trains nothing but still counts in means over rows.

    >>> lp = torch.tensor([-0.5, -0.1, -0.9], requires_grad=True)
    >>> row, lengths = torch.tensor([0, 0, 1]), torch.tensor([2, 1])
    >>> advantages = torch.tensor([1.0, 1.0, -1.0])
    >>> per_token, stats = policy_loss(Objective(loss="grpo"), lp, None, row, advantages, rows=2)
    >>> weights = token_weights("grpo", row, lengths, rows_total=2, tokens_total=3, max_completion_length=8)
    >>> (per_token * weights).sum().item()  # summed over micro-batches: the loss of the step
    0.0

The caller gives the normalisers, so splitting a step into micro-batches changes nothing.
Departures from TRL, all deliberate: log-ratios and reference differences are clamped to ±20 so
that no infinity meets a zero gradient; `bnpo` is the token mean of the whole optimizer step, not
a mean of micro-batch means; clip fractions and ratios are means over tokens at either ratio level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from palestra.core.errors import InputError, SettingError, UserCodeError, text_of
from palestra.core.machine import in_one_order

LossName = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo", "gspo", "cross_entropy"]
Ratio = Literal["token", "sequence"]
ImportanceCorrection = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

LOG_RATIO_LIMIT = 20.0
# VESPO's gamma weight, by the sign of the advantage: (k, lambda).
VESPO_POSITIVE = (2.0, 3.0)
VESPO_NEGATIVE = (3.0, 2.0)
VESPO_LOG_FLOOR = math.log(1e-8)


@dataclass(frozen=True)
class Objective:
    """Which formula, and its constants.

    `gspo` is `grpo` with the sequence ratio; `cross_entropy` is −advantage · logprob, for demonstrations.
    """

    loss: LossName = "dapo"
    ratio: Ratio = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None  # see `upper`
    delta: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    beta: float = 0.0
    kl_bias_correction: bool = False
    importance_correction: ImportanceCorrection = "none"
    importance_cap: float = 2.0
    importance_floor: float = 0.0  # masks drop weights below it (IcePop), truncation raises them to it
    off_policy_mask_threshold: float | None = None
    custom: LossFunction | None = None  # takes the place of the formula of `loss`, which then says how tokens add up

    def __post_init__(self) -> None:
        if self.loss == "vespo" and self.importance_correction.startswith("sequence"):
            raise SettingError(
                f"vespo weighs whole sequences itself, got importance_correction={self.importance_correction!r}; "
                "use token_truncate, token_mask or none"
            )

    @property
    def upper(self) -> float:
        """The ratio's upper clip: 1 + epsilon_high (0.28 unless given), for cispo epsilon_high (5) itself."""
        if self.loss == "cispo":
            return 5.0 if self.epsilon_high is None else self.epsilon_high
        return 1.0 + (0.28 if self.epsilon_high is None else self.epsilon_high)

    @property
    def sequence_ratio(self) -> bool:
        return self.ratio == "sequence" or self.loss == "gspo"

    @property
    def is_sum_over_tokens(self) -> bool:
        """Whether the loss of a token depends on no other token."""
        by_row = self.sequence_ratio or self.loss == "vespo" or self.importance_correction.startswith("sequence")
        return not by_row and self.off_policy_mask_threshold is None and self.custom is None


@dataclass(frozen=True)
class PolicyTokens:
    """What a custom loss is given: N trained tokens of `rows` rows. All tokens of a row are together in one call, those
    of a group need not be. Only `logprobs` and `ratio` have a gradient, and `entropy` with an entropy coefficient.

    >>> def reinforce(tokens):
    ...     return -tokens.advantages * tokens.logprobs          # [N]: the loss of each token
    """

    logprobs: Tensor  # [N] of the policy
    old_logprobs: Tensor  # [N] of the policy that sampled, or that the step began with
    ratio: Tensor  # [N] exp(logprobs - old_logprobs); with train.ratio = sequence its mean over the row
    advantages: Tensor  # [N]
    row: Tensor  # [N] int64
    rows: int
    objective: Objective  # epsilon, beta, … of the settings
    sampler_logprobs: Tensor | None = None  # [N]
    ref_logprobs: Tensor | None = None  # [N], with train.beta above 0
    entropy: Tensor | None = None  # [N]


LossFunction = Callable[[PolicyTokens], Tensor]


@dataclass(frozen=True)
class TokenStats:
    """Sums and maxima over tokens; add them over micro-batches, then `finish` once."""

    tokens: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)  # of sums over fewer than all tokens

    def __add__(self, other: TokenStats) -> TokenStats:
        added = TokenStats(self.tokens + other.tokens, dict(self.sums), dict(self.maxima), dict(self.counts))
        for mine, theirs, join in (
            (added.sums, other.sums, torch.add),
            (added.maxima, other.maxima, torch.maximum),
            (added.counts, other.counts, torch.add),
        ):
            for name, value in theirs.items():
                mine[name] = join(mine[name], value) if name in mine else value
        return added

    def each(self, function: Callable[[Any], Any]) -> TokenStats:
        """The same with the results of a function of each tensor."""
        kinds = (self.sums, self.maxima, self.counts)
        return TokenStats(self.tokens, *({name: function(x) for name, x in kind.items()} for kind in kinds))

    def finish(self) -> dict[str, float]:
        """Means and maxima by name; nothing at all where no token was trained."""
        if self.tokens == 0:
            return {}
        columns = [*self.sums.values(), *self.maxima.values(), *self.counts.values()]
        values = torch.stack(columns).tolist()  # at once: a GPU is waited for
        counts = dict.fromkeys(self.sums, float(self.tokens)) | dict.fromkeys(self.maxima, 1.0)
        counts |= dict(zip(self.counts, values[len(counts) :], strict=True))
        return {name: value / counts[name] for name, value in zip(counts, values, strict=False) if counts[name]}


def policy_loss(
    objective: Objective,
    logprobs: Tensor,  # [N]
    old_logprobs: Tensor | None,  # [N]; None: exactly on-policy
    row: Tensor,  # [N] int64
    advantages: Tensor,  # [N]
    *,
    rows: int,  # R
    sampler_logprobs: Tensor | None = None,  # [N]
    ref_logprobs: Tensor | None = None,  # [N]
    entropy: Tensor | None = None,  # [N], reported only; the bonus is `entropy.entropy_bonus`
) -> tuple[Tensor, TokenStats]:
    """The loss of each token, before reduction, and what to report about the tokens."""
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    advantage = advantages.to(logprobs.dtype)
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (_row_mean(log_ratio, row, rows) if objective.sequence_ratio else log_ratio).exp()

    correction = None
    if objective.importance_correction != "none":
        sampler = _needed(sampler_logprobs, "sampler_logprobs", "importance_correction")
        correction = importance_weights(objective, old, sampler, row, rows)

    known = (sampler_logprobs, ref_logprobs, entropy)
    tokens = PolicyTokens(logprobs, old, ratio, advantage, row, rows, objective, *known)
    if objective.custom is not None:
        loss = custom_loss(objective.custom, tokens)
    elif objective.loss == "vespo":
        # The sampler's correction belongs inside VESPO's sequence weight, not in front of it.
        phi = vespo_weights(log_ratio, row, advantages, correction, rows)
        loss = -phi * advantage * logprobs
        correction = None
    else:
        loss = _surrogate(objective, ratio, advantage, logprobs)

    if objective.off_policy_mask_threshold is not None:
        behaviour = old if sampler_logprobs is None else sampler_logprobs
        drift = _row_mean(behaviour - logprobs.detach(), row, rows)
        loss = loss * ((advantage >= 0) | (drift <= objective.off_policy_mask_threshold))
    if correction is not None:
        loss = loss * correction
    if objective.beta > 0:
        kl = k3(logprobs, _needed(ref_logprobs, "ref_logprobs", "beta > 0"))
        loss = loss + objective.beta * kl * (ratio if objective.kl_bias_correction else 1.0)

    return loss, _token_stats(tokens)


def custom_loss(function: LossFunction, tokens: PolicyTokens) -> Tensor:
    """[N] what a user's function gives for these tokens; PalestraError where that cannot be a loss."""
    name, count = f"the loss function {getattr(function, '__name__', function)}", len(tokens.logprobs)
    try:
        loss = function(tokens)
    except Exception as error:
        raise UserCodeError(f"{name} raised {text_of(error)}") from error
    if not isinstance(loss, Tensor) or loss.shape != (count,) or not loss.is_floating_point():
        got = f"a {loss.dtype} tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:80]
        raise UserCodeError(
            f"{name} gave {got}; expected a float tensor of shape [{count}], the loss of each token before they are "
            "added up"
        )
    if not (finite := loss.isfinite()).all():
        at = int((~finite).nonzero()[0])
        raise UserCodeError(
            f"{name} gave {loss[at].item()} for token {at} (logprob {tokens.logprobs[at].item():.4g}, advantage "
            f"{tokens.advantages[at].item():.4g}); expected finite numbers. Clamp ratios and logarithms"
        )
    if count and tokens.logprobs.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise UserCodeError(f"{name} has no gradient; compute it from tokens.logprobs or tokens.ratio, not detached")
    return loss


def token_weights(
    loss: LossName,
    row: Tensor,  # [N]
    row_lengths: Tensor,  # [R] trained tokens of each row of this micro-batch
    *,
    rows_total: int,
    tokens_total: float,
    max_completion_length: int,
) -> Tensor:
    """[N] float64 weights: `(per_token_loss * weights).sum()`, added over micro-batches, is the step's loss.

    `rows_total` counts every row of the optimizer step, also those without trained tokens.
    `tokens_total` is the trained tokens of the optimizer step; where one batch of rollouts is split
    into several steps, dapo, cispo and vespo take the batch's tokens divided by the number of steps.
    """
    ones = torch.ones(len(row), dtype=torch.float64, device=row.device)
    match loss:
        case "grpo" | "gspo" | "sapo":
            return 1.0 / (row_lengths.to(torch.float64).clamp(min=1.0)[row] * max(rows_total, 1))
        case "luspo":
            return ones / max(rows_total, 1)
        case "dr_grpo":
            return ones / (max(rows_total, 1) * max_completion_length)
        case "bnpo" | "dapo" | "cispo" | "vespo" | "cross_entropy":
            return ones / max(tokens_total, 1.0)


def importance_weights(objective: Objective, old: Tensor, sampler: Tensor, row: Tensor, rows: int) -> Tensor:
    """[N] correction for the sampler and the learner disagreeing about the same weights."""
    level, _, how = objective.importance_correction.partition("_")
    log_weight = old - sampler
    if level == "sequence":
        log_weight = row_sum(log_weight, row, rows)[row]
    weight = log_weight.exp().detach()
    if how == "truncate":
        return weight.clamp(objective.importance_floor, objective.importance_cap)
    return weight.masked_fill((weight > objective.importance_cap) | (weight < objective.importance_floor), 0.0)


@torch.no_grad()
def vespo_weights(log_ratio: Tensor, row: Tensor, advantages: Tensor, correction: Tensor | None, rows: int) -> Tensor:
    """[N] φ(w) = exp(λ + k·log w − λ·w); w is the ratio of the token's row, k and λ go by its advantage's sign."""
    log_tokens = log_ratio
    if correction is not None:
        log_tokens = log_tokens + correction.log().clamp(VESPO_LOG_FLOOR, LOG_RATIO_LIMIT)
    log_w = row_sum(log_tokens, row, rows).clamp(VESPO_LOG_FLOOR, LOG_RATIO_LIMIT)[row]
    positive = advantages >= 0
    k = torch.where(positive, VESPO_POSITIVE[0], VESPO_NEGATIVE[0])
    lam = torch.where(positive, VESPO_POSITIVE[1], VESPO_NEGATIVE[1])
    return (lam + k * log_w - lam * log_w.exp()).exp().to(log_ratio.dtype)


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """[N] estimate of KL(policy ‖ other) at tokens of the policy: never negative, little variance."""
    difference = (other - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1.0


def _surrogate(objective: Objective, ratio: Tensor, advantage: Tensor, logprobs: Tensor) -> Tensor:
    match objective.loss:
        case "cispo":
            return -ratio.clamp(max=objective.upper).detach() * advantage * logprobs
        case "cross_entropy":
            return -advantage * logprobs
        case "sapo":
            tau = torch.where(advantage > 0, objective.sapo_temperature_pos, objective.sapo_temperature_neg)
            return -torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau * advantage
        case _:
            clipped = ratio.clamp(1.0 - objective.epsilon, objective.upper)
            free = ratio if objective.delta is None else ratio.clamp(max=objective.delta)
            return -torch.minimum(free * advantage, clipped * advantage)


@torch.no_grad()
def _token_stats(tokens: PolicyTokens) -> TokenStats:
    objective, ratio, advantage, logprobs = tokens.objective, tokens.ratio, tokens.advantages, tokens.logprobs
    low = high = torch.zeros_like(ratio, dtype=torch.bool)
    if objective.loss not in ("sapo", "vespo", "cross_entropy"):
        high = (ratio > objective.upper) & (advantage > 0)
    if objective.loss not in ("sapo", "vespo", "cispo", "cross_entropy"):
        low = (ratio < 1.0 - objective.epsilon) & (advantage < 0)
    clipped = {"clip_fraction_low": low, "clip_fraction_high": high} if objective.custom is None else {}
    values = {**clipped, "ratio_mean": ratio}
    if tokens.sampler_logprobs is not None:
        # The tokens are the sampler's, so this is KL(sampler ‖ policy).
        values["kl_sampler"] = k3(tokens.sampler_logprobs, logprobs)
        values["sampler_gap_mean"] = (tokens.sampler_logprobs - logprobs).abs()
    if tokens.ref_logprobs is not None:
        values["kl_reference"] = k3(logprobs, tokens.ref_logprobs)
    if tokens.entropy is not None:
        values["entropy"] = tokens.entropy
    sums = {name: value.sum(dtype=torch.float64) for name, value in values.items()}
    maxima = {"ratio_max": ratio.max().double()} if len(ratio) else {}
    if len(ratio) and tokens.sampler_logprobs is not None:
        maxima["sampler_gap_max"] = values["sampler_gap_mean"].max().double()
    return TokenStats(len(ratio), sums, maxima)


def row_sum(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """[rows] the sum of each row's values."""
    with in_one_order(values):
        return torch.zeros(rows, dtype=values.dtype, device=values.device).index_add(0, row, values)


def _row_mean(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """[N] the mean over each token's row."""
    counts = row_sum(torch.ones_like(values), row, rows)
    return (row_sum(values, row, rows) / counts.clamp(min=1.0))[row]


def _needed(value: Tensor | None, name: str, setting: str) -> Tensor:
    if value is None:
        raise InputError(f"{setting} needs {name}, got None; pass {name} [N] to policy_loss")
    return value
