"""Groups of rollouts -> advantages -> the batch of a step."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from palestra.algo.advantage import advantages as normalise
from palestra.algo.advantage import combine_measures
from palestra.algo.batch import Batch
from palestra.core.config_sections import TrainSection
from palestra.core.errors import InputError, UserCodeError
from palestra.core.types import CUT_OFF, Array, Group, Lineage, Rollout, Score, Turn, oldest_version
from palestra.evals.judge_stats import is_total
from palestra.evals.rollout_stats import called_successfully, is_judged, rollout_stats


def has_signal(group: Group, advantages: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Whether there is something to learn: by these advantages, one a rollout, or by those of its tokens."""

    def of_tokens(rollout: Rollout) -> bool:
        return any(c.advantages is not None and bool(c.advantages.any()) for c in rollout.conversations)

    return any(
        abs(advantage) > tolerance if rollout.advantages is None else of_tokens(rollout)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    )


def group_advantages(groups: Sequence[Group], train: TrainSection, weights: Mapping[str, float]) -> list[list[float]]:
    """The advantage of every rollout, by group. A rollout that failed has none and is in no baseline."""
    for group in groups:
        for i, reward in enumerate(group.rewards):
            if not math.isfinite(reward):
                raise UserCodeError(
                    f"the reward of rollout {i} in the group of problem {group.problem_id!r} is {reward}; "
                    "a measure or reward function must return finite numbers"
                )
    rows = [(g, i) for g, group in enumerate(groups) for i, r in enumerate(group.rollouts) if r.error is None]
    result = [[0.0] * len(group.rollouts) for group in groups]
    if not rows:
        return result
    rollouts = [groups[g].rollouts[i] for g, i in rows]
    members = torch.tensor([g for g, _ in rows])
    scale, leave_one_out = train.advantage_scale, train.leave_one_out
    names = list(dict.fromkeys(name for r in rollouts for name in r.scores))
    if train.combine == "normalise_then_sum" and len(names) > 1:
        unknown = Score(math.nan, None)  # of a measure that was not run on a rollout
        values = torch.tensor([[r.scores.get(name, unknown).value for name in names] for r in rollouts])
        per_measure = torch.tensor([weights.get(n, 1.0) for n in names])
        values_out = combine_measures(values, per_measure, members, scale=scale, leave_one_out=leave_one_out)
    else:
        rewards = torch.tensor([r.reward for r in rollouts])
        values_out = normalise(rewards, members, scale=scale, leave_one_out=leave_one_out)
    for (g, i), value in zip(rows, values_out.tolist(), strict=True):
        result[g][i] = value
    return result


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation of a step's rollouts: a row of the batch if it is trained."""

    number: int  # among all conversations of the step
    group: int
    rollout: Rollout
    turns: Rollout | Lineage
    advantage: float

    @property
    def can_train(self) -> bool:
        """False for failed rollouts, and lineages in which no turn was sampled (rejected choices, side calls)."""
        is_sampled = self.turns is self.rollout or any(turn.maker == "model" for turn in self.turns.turns)
        return self.rollout.error is None and is_sampled


def conversations_of(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> list[Conversation]:
    """All conversations of a step, also of rollouts that failed."""
    conversations: list[Conversation] = []
    for g, (group, row) in enumerate(zip(groups, advantages, strict=True)):
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            for turns in rollout.conversations:
                conversations.append(Conversation(len(conversations), g, rollout, turns, advantage))
    return conversations


def to_batch(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    *,
    mask_truncated: bool,
    trained: Sequence[bool] | None = None,
    echo: bool = False,
    with_routing: bool = False,
) -> Batch:
    """A row for each conversation of the rollouts that did not fail, of all groups or the `trained` ones.

    With `echo`, tool results of the other groups are rows, too: no reward is needed to learn to predict them.
    A truncated rollout stays as a row without trained tokens, so that it still counts where a loss averages over rows.
    Advantages of a rollout's tokens take precedence. `with_routing` adds the experts that the sampler recorded.
    """
    every = trained or [True] * len(groups)
    rows = [c for c in conversations_of(groups, advantages) if c.can_train]
    is_masked = {c.number: mask_truncated and c.turns.stop in CUT_OFF for c in rows}
    rows = [c for c in rows if every[c.group] or (echo and not is_masked[c.number] and _has_results(c))]
    columns = TurnColumns.of(rows)
    lengths = columns.lengths
    unmasked = np.repeat(np.array([not is_masked[c.number] for c in rows], np.bool_), lengths)
    in_policy = np.repeat(np.array([every[c.group] for c in rows], np.bool_), lengths)
    return Batch(
        token_ids=columns.token_ids,
        policy_mask=columns.by_model & unmasked & in_policy,
        echo_mask=columns.by_environment & unmasked,
        logprobs=columns.logprobs,
        advantages=columns.advantages,
        versions=columns.versions,
        offsets=np.cumsum([0, *lengths]),
        groups=np.array([c.group for c in rows], int),
        prompt_lengths=np.array([len(c.turns.turns[0].token_ids) for c in rows], int),
        conversations=np.array([c.number for c in rows], int),
        routing=routing_column([c.turns.turns for c in rows]) if with_routing else None,
    )


def routing_column(rows: Sequence[Sequence[Turn]]) -> Array | None:
    """[T, layers, k] the experts of the rows' tokens, as the sampler recorded them; None if it recorded none.

    Unknown are tokens that were never computed, such as the last one of a row: they have the dtype's largest number.
    """
    recorded = next((t.routing for turns in rows for t in turns if t.routing is not None and len(t.routing)), None)
    if recorded is None:
        return None
    unknown = np.iinfo(recorded.dtype).max
    size = sum(len(turn.token_ids) for turns in rows for turn in turns)
    column = np.full((size, *recorded.shape[1:]), unknown, recorded.dtype)
    end = 0
    for turns in rows:
        start = end
        for turn in turns:
            end += len(turn.token_ids)
            if turn.routing is None:
                continue
            first = end - 1 - len(turn.routing)
            if first < start:
                raise InputError(f"a row of {end - start} tokens has the experts of {len(turn.routing)}")
            part = column[first : end - 1]
            np.copyto(part, turn.routing, where=turn.routing != unknown)
    return column


def trainable_batch(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], train: TrainSection, *, echo: bool = False
) -> Batch:
    """The batch of the groups that are trained on: those with signal, unless `filter_equal_groups` is off."""
    pairs = zip(groups, advantages, strict=True)
    trained = [has_signal(group, row) or not train.filter_equal_groups for group, row in pairs]
    options = {"mask_truncated": train.mask_truncated, "echo": echo, "with_routing": train.expert_routing != "own"}
    return to_batch(groups, advantages, trained=trained, **options)


def _has_results(conversation: Conversation) -> bool:
    return any(turn.maker == "environment" and len(turn.token_ids) for turn in conversation.turns.turns)


@dataclass(frozen=True, slots=True)
class TurnColumns:
    """The tokens of conversations end to end. Built for all of them at once, since most turns are so short that a call
    of numpy for each would take longer than its work."""

    lengths: list[int]  # of the conversations
    token_ids: Array  # [T] int32
    by_model: Array  # [T] bool
    by_environment: Array  # [T] bool
    logprobs: Array  # [T] float32, 0 where the model did not sample the token
    versions: Array  # [T] int32, 0 where the model did not sample the token
    advantages: Array  # [T] float32

    @classmethod
    def of(cls, conversations: Sequence[Conversation]) -> TurnColumns:
        turns = [turn for conversation in conversations for turn in conversation.turns.turns]
        sizes = [len(turn.token_ids) for turn in turns]
        by_model, by_environment = (
            np.repeat(np.array([turn.maker == maker for turn in turns], np.bool_), sizes)
            for maker in ("model", "environment")
        )
        logprobs, versions = np.zeros(len(by_model), np.float32), np.zeros(len(by_model), np.int32)
        if turns:  # arrays of other turns are empty
            logprobs[by_model] = np.concatenate([turn.logprobs for turn in turns])
            versions[by_model] = np.concatenate([turn.versions for turn in turns])
        token_ids = np.concatenate([np.zeros(0, np.int32), *(turn.token_ids for turn in turns)])
        lengths = [sum([len(turn.token_ids) for turn in c.turns.turns]) for c in conversations]
        advantages = np.repeat(np.array([c.advantage for c in conversations], np.float32), lengths)
        for end, length, conversation in zip(np.cumsum(lengths), lengths, conversations, strict=True):
            if conversation.turns.advantages is not None:
                advantages[end - length : end] = conversation.turns.advantages
        return cls(lengths, token_ids, by_model, by_environment, logprobs, versions, advantages)


def peak_memory_gib() -> float:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)


def rollout_metrics(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], policy_version: int
) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools, failures and advantages of one step's groups."""
    pairs = list(zip(groups, advantages, strict=True))
    out = rollout_stats([r for group in groups for r in group.rollouts])
    good = [(r, a) for group, row in pairs for r, a in zip(group.rollouts, row, strict=True) if r.error is None]
    if not good:
        return out
    flat = [advantage if r.advantages is None else _mean_advantage(r) for r, advantage in good]
    oldest = oldest_version(r for r, _ in good)
    with_signal = sum(has_signal(group, row) for group, row in pairs)
    out |= {
        "groups": float(len(groups)),
        "signal_groups": float(with_signal),
        "advantage_mean": statistics.fmean(flat),
        "advantage_max": max(flat),
        "advantage_min": min(flat),
        "equal_reward_groups": 1.0 - with_signal / len(groups),
        "staleness_max": 0.0 if oldest is None else float(policy_version - oldest),
    }
    out |= _group_outcomes(groups) | _reinforced(list(zip([r for r, _ in good], flat, strict=True)))
    for name in dict.fromkeys(name for g in groups for name in g.metrics):
        values = [g.metrics[name] for g in groups if name in g.metrics]
        out[name] = sum(values) if is_total(name) else statistics.fmean(values)
    return out


def _group_outcomes(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of the groups in which every rollout passed, and in which none did."""
    verdicts = [[r.passed for r in g.rollouts if r.error is None and is_judged(r)] for g in groups]
    judged = [row for row in verdicts if row]
    if not judged:
        return {}
    return {
        "passed_groups": statistics.fmean(all(row) for row in judged),
        "failed_groups": statistics.fmean(not any(row) for row in judged),
    }


def _reinforced(rollouts: Sequence[tuple[Rollout, float]]) -> dict[str, float]:
    """Count the rollouts with a positive advantage, and those of them in which no tool call succeeded."""
    if not any(r.tool_names for r, _ in rollouts):
        return {}
    reinforced = [r for r, advantage in rollouts if advantage > 1e-6 and r.tool_names]
    without = sum(not called_successfully(r) for r in reinforced)
    return {"reinforced_rollouts": float(len(reinforced)), "reinforced_without_tools": float(without)}


def _mean_advantage(rollout: Rollout) -> float:
    """Of advantages that came along with the rollout, token by token: their mean over the model's own tokens."""
    by_model = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in rollout.turns])
    assert rollout.advantages is not None
    return float(rollout.advantages[by_model].mean()) if by_model.any() else 0.0
