"""Groups of rollouts -> advantages -> the batch of a step."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from palestra.algo.advantage import advantages as normalise
from palestra.algo.advantage import combine_measures
from palestra.algo.batch import Batch, not_sampled
from palestra.core.config_sections import TrainSection
from palestra.core.errors import InputError, UserCodeError
from palestra.core.types import CUT_OFF, Array, Group, Rollout, Score, Turn, oldest_version
from palestra.evals.rollout_stats import called_successfully, is_total, rollout_stats


def has_signal(group: Group, advantages: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Whether there is something to learn: by these advantages, one a rollout, or by those of its tokens."""
    for rollout, advantage in zip(group.rollouts, advantages, strict=True):
        if rollout.advantages is None:
            if abs(advantage) > tolerance:
                return True
        elif any(c.advantages is not None and c.advantages.any() for c in rollout.conversations):
            return True
    return False


def group_advantages(groups: Sequence[Group], train: TrainSection, weights: Mapping[str, float]) -> list[list[float]]:
    """The advantage of every rollout, by group. A rollout that failed has none and is in no baseline."""
    result = [[0.0] * len(group.rollouts) for group in groups]
    places: list[tuple[list[float], int]] = []  # of the rollouts in `result`
    rollouts: list[Rollout] = []
    members: list[int] = []
    rewards: list[float] = []
    for g, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            if not math.isfinite(rollout.reward):
                raise UserCodeError(
                    f"the reward of rollout {i} in the group of problem {group.problem_id!r} is {rollout.reward}; "
                    "a measure or reward function must return finite numbers"
                )
            if rollout.error is None:
                places.append((result[g], i))
                rollouts.append(rollout)
                members.append(g)
                rewards.append(rollout.reward)
    if not places:
        return result
    options: dict[str, Any] = {"scale": train.advantage_scale, "leave_one_out": train.leave_one_out}
    names = list(dict.fromkeys(chain.from_iterable(map(attrgetter("scores"), rollouts))))
    if train.combine == "normalise_then_sum" and len(names) > 1:
        unknown = Score(math.nan, None)  # of a measure that was not run on a rollout
        scores = torch.tensor([[r.scores.get(name, unknown).value for name in names] for r in rollouts])
        per_measure = torch.tensor([weights.get(n, 1.0) for n in names])
        values = combine_measures(scores, per_measure, torch.tensor(members), **options)
    else:
        values = normalise(torch.tensor(rewards), torch.tensor(members), **options)
    for (row, i), value in zip(places, values.tolist(), strict=True):
        row[i] = value
    return result


def to_batch(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    *,
    mask_truncated: bool = False,
    trained: Sequence[bool] | None = None,
    echo: bool = False,
    with_routing: bool = False,
    everything: bool = False,
) -> Batch:
    """A row for each conversation of the rollouts that did not fail, of all groups or the `trained` ones.

    With `echo`, tool results of the other groups are rows, too: no reward is needed to learn to predict them.
    A truncated rollout stays as a row without trained tokens, so that it still counts where a loss averages over rows.
    Advantages of a rollout's tokens take precedence. `with_routing` adds the experts that the sampler recorded.
    `everything`: all conversations are rows, also those of rollouts that failed, and nothing is masked.
    """
    rows: list[tuple[Turn, ...]] = []
    values: list[float] = []  # the advantage of each row
    of_tokens: list[tuple[int, Array]] = []  # those of its tokens, with the number of the row
    numbers: list[int] = []
    row_groups: list[int] = []
    masks: list[tuple[bool, bool]] = []  # whether the row counts in the policy loss, and in ECHO's
    number = -1
    for g, (group, row) in enumerate(zip(groups, advantages, strict=True)):
        is_trained = trained is None or trained[g]
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            for conversation in rollout.conversations:
                number += 1
                turns = conversation.turns
                is_masked = False
                if not everything:
                    # in another conversation there may be no sampled turn: rejected choices, side calls
                    is_sampled = conversation is rollout or any(turn.maker == "model" for turn in turns)
                    if rollout.error is not None or not is_sampled:
                        continue
                    is_masked = mask_truncated and conversation.stop in CUT_OFF
                    if not is_trained and (is_masked or not (echo and _has_results(turns))):
                        continue
                if conversation.advantages is not None:
                    of_tokens.append((len(rows), conversation.advantages))
                rows.append(turns)
                values.append(advantage)
                numbers.append(number)
                row_groups.append(g)
                masks.append((is_trained and not is_masked, not is_masked))
    batch = _concatenated(rows)
    batch.groups, batch.conversations = np.array(row_groups, int), np.array(numbers, int)
    in_policy, in_echo = np.repeat(np.array(masks, np.bool_).reshape(-1, 2), batch.lengths, axis=0).T
    batch.policy_mask &= in_policy
    batch.echo_mask &= in_echo
    batch.advantages = np.repeat(np.array(values, np.float32), batch.lengths)
    for place, own in of_tokens:
        batch.advantages[batch.offsets[place] : batch.offsets[place + 1]] = own
    if with_routing and (routing := routing_column(rows)) is not None:
        batch.sampled["routing"] = routing
    return batch


def _has_results(turns: Sequence[Turn]) -> bool:
    return any(turn.maker == "environment" and len(turn.token_ids) for turn in turns)


def _concatenated(rows: Sequence[tuple[Turn, ...]]) -> Batch:
    """The rows end to end, with masks of all tokens of the model and of all tool results.

    Most turns are so short that a call of numpy for each would take longer than its work: all are concatenated at once.
    """
    turns = list(chain.from_iterable(rows))
    ids = list(map(attrgetter("token_ids"), turns))
    sizes = np.array(list(map(len, ids)), int)
    maker = np.array(list(map(attrgetter("maker"), turns)), np.str_)
    by_model = np.repeat(maker == "model", sizes)
    first_turns = np.cumsum([0, *map(len, rows)])
    sampled = not_sampled(len(by_model))
    for name, column in sampled.items():
        column[by_model] = np.concatenate([column[:0], *map(attrgetter(name), turns)])
    return Batch(
        token_ids=np.concatenate([np.zeros(0, np.int32), *ids]),
        policy_mask=by_model,
        echo_mask=np.repeat(maker == "environment", sizes),
        advantages=np.zeros(len(by_model), np.float32),
        sampled=sampled,
        offsets=np.concatenate([[0], np.cumsum(sizes)])[first_turns],
        groups=np.zeros(len(rows), int),
        prompt_lengths=np.array([len(row[0].token_ids) if row else 0 for row in rows], int),
        conversations=np.arange(len(rows)),
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
    trained = list(map(has_signal, groups, advantages)) if train.filter_equal_groups else None
    options = {"mask_truncated": train.mask_truncated, "echo": echo, "with_routing": train.expert_routing != "own"}
    return to_batch(groups, advantages, trained=trained, **options)


def peak_memory_gib() -> float:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 30 if sys.platform == "darwin" else 1 << 20)


def rollout_metrics(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], policy_version: int
) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools, failures and advantages of one step's groups."""
    every: list[Rollout] = []
    good: list[Rollout] = []
    flat: list[float] = []  # advantages; of those that came along token by token, the mean of the model's own tokens
    verdicts: list[list[bool]] = []  # of the groups in which rollouts are judged
    reinforced: list[Rollout] = []  # those with tools and a positive advantage
    with_signal = 0
    for group, row in zip(groups, advantages, strict=True):
        every += group.rollouts
        with_signal += has_signal(group, row)
        own: list[bool] = []
        for rollout, advantage in zip(group.rollouts, row, strict=True):
            if rollout.error is not None:
                continue
            if rollout.advantages is not None:
                by_model = np.concatenate([np.full(len(t.token_ids), t.maker == "model") for t in rollout.turns])
                advantage = float(rollout.advantages[by_model].mean()) if by_model.any() else 0.0
            good.append(rollout)
            flat.append(advantage)
            if advantage > 1e-6 and rollout.tool_names:
                reinforced.append(rollout)
            if (verdict := rollout.verdict) is not None:
                own.append(verdict)
        verdicts += [own] if own else []
    out = rollout_stats(every)
    if not good:
        return out
    oldest = oldest_version(good)
    out |= {
        "groups": float(len(groups)),
        "signal_groups": float(with_signal),
        "advantage_mean": statistics.fmean(flat),
        "advantage_max": max(flat),
        "advantage_min": min(flat),
        "equal_reward_groups": 1.0 - with_signal / len(groups),
        "staleness_max": 0.0 if oldest is None else float(policy_version - oldest),
    }
    if verdicts:
        out["passed_groups"] = sum(map(all, verdicts)) / len(verdicts)
        out["failed_groups"] = (len(verdicts) - sum(map(any, verdicts))) / len(verdicts)
    if out["tools_offered"]:
        out["reinforced_rollouts"] = float(len(reinforced))
        out["reinforced_without_tools"] = float(len(reinforced) - sum(map(called_successfully, reinforced)))
    logged: dict[str, list[float]] = {}
    for group in groups:
        for name, value in group.metrics.items():
            logged.setdefault(name, []).append(value)
    for name, values in logged.items():
        out[name] = sum(values) if is_total(name) else statistics.fmean(values)
    return out
