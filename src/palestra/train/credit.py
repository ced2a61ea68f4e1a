"""Which advantage each token gets: one for the whole rollout, one for each turn, or what a user's function says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from palestra.algo.advantage import gigpo_advantages, return_advantages
from palestra.algo.batch import Batch
from palestra.algo.losses import LossFunction
from palestra.core.config_sections import TrainSection
from palestra.core.errors import SettingError, UserCodeError, text_of
from palestra.core.files import import_function
from palestra.core.types import Array, Group, Lineage, Rollout
from palestra.rollout.rewards import role_score
from palestra.train.batch import group_advantages, to_batch

# a step's batch -> [R] or [T] advantages; `batch.advantages` are those of the settings
AdvantageFunction = Callable[[Batch], Any]


@dataclass(frozen=True, slots=True)
class CustomObjective:
    """A user's functions in the place of the built-in ones."""

    advantages: AdvantageFunction | None = None
    loss: LossFunction | None = None

    @classmethod
    def of(cls, train: TrainSection, advantages: Any = None, loss: Any = None) -> CustomObjective:
        """Functions that were given in Python, or those that the settings name as FILE:NAME."""
        functions = {"advantages": advantages, "loss": loss}
        for name, spec in {"advantages": train.custom_advantages, "loss": train.custom_loss}.items():
            function, key = functions[name], f"train.custom_{name}"
            if function is not None and spec is not None:
                raise SettingError(f"{name} is given as a function and as {key} = {spec}; give one of them")
            if spec is not None:
                functions[name] = function = import_function(spec, key)
            if function is not None and not callable(function):
                raise SettingError(f"{name} is {function!r}; expected a function (docs/objectives.md)")
        return cls(**functions)

    def names(self) -> dict[str, str]:
        """For run.json: which functions the run was trained with."""
        functions = {"advantages": self.advantages, "loss": self.loss}
        return {name: getattr(f, "__name__", str(f)) for name, f in functions.items() if f is not None}

    def require(self, names: Mapping[str, str]) -> None:
        """PalestraError unless it has the functions that a resumed run was trained with."""
        if missing := {name: function for name, function in names.items() if getattr(self, name) is None}:
            given = ", ".join(f"{name}={function}" for name, function in missing.items())
            raise SettingError(
                f"the run was trained with functions of its own; continue it from Python with them: "
                f"train_grpo(…, {given}, resume=…), or train with train.custom_loss and train.custom_advantages"
            )


BUILT_IN = CustomObjective()


def with_role_advantages(groups: Sequence[Group], train: TrainSection, weights: Mapping[str, float]) -> list[Group]:
    """The groups with an advantage for each conversation, by the role of its agent.

    An agent's baseline is the reward of the same agent in the other attempts.
    """
    values: dict[str, list[list[float]]] = {}
    for role in dict.fromkeys(c.role for group in groups for r in group.rollouts for c in r.conversations):
        as_seen = []  # by this agent: its own scores and rewards
        for group in groups:
            rollouts = []
            for rollout in group.rollouts:
                scores = {n: replace(s, value=role_score(s, role), roles={}) for n, s in rollout.scores.items()}
                reward = sum(weights.get(name, 1.0) * score.value for name, score in scores.items())
                rollouts.append(replace(rollout, scores=scores, reward=reward, advantages=None, lineages=()))
            as_seen.append(replace(group, rollouts=tuple(rollouts)))
        values[role] = group_advantages(as_seen, train, weights)

    def changed(g: int, i: int, rollout: Rollout) -> Rollout:
        return _with_columns(rollout, lambda c: np.full(_size(c), values[c.role][g][i], np.float32))

    return _changed(groups, changed)


def _size(conversation: Rollout | Lineage) -> int:
    return sum(len(turn.token_ids) for turn in conversation.turns)


def _with_columns(rollout: Rollout, column: Callable[[Rollout | Lineage], Array]) -> Rollout:
    """The rollout with these advantages of the tokens of each conversation, its own last."""
    lineages = tuple(replace(lineage, advantages=column(lineage)) for lineage in rollout.lineages)
    return replace(rollout, advantages=column(rollout), lineages=lineages)


def _changed(groups: Sequence[Group], change: Callable[[int, int, Rollout], Rollout]) -> list[Group]:
    """The groups with changed rollouts, by the number of the group and in the group."""
    return [
        replace(group, rollouts=tuple(change(g, i, rollout) for i, rollout in enumerate(group.rollouts)))
        for g, group in enumerate(groups)
    ]


def turn_rewards(rollout: Rollout, weights: Mapping[str, float]) -> Array:
    """[K] float64: what each turn of the model earned. What no measure gives to a turn belongs to the last one."""
    rewards = np.zeros(len(rollout.model_turns))
    for name, score in rollout.scores.items():
        if score.turns and len(score.turns) == len(rewards):
            rewards += weights.get(name, 1.0) * np.array(score.turns)
    if len(rewards):
        rewards[-1] += rollout.reward - rewards.sum()
    return rewards


def states_of(rollout: Rollout) -> list[str | bytes]:
    """The state in which each turn of the model began: its key, or the tokens that the model has read since its last
    turn, so that equal observations are equal states."""
    observed: list[str | bytes] = []
    for turns in (*(lineage.turns for lineage in rollout.lineages), rollout.turns):
        read: list[Array] = []
        for turn in turns:
            if turn.maker == "model":
                observed.append(np.concatenate([np.zeros(0, np.int32), *read]).tobytes())
                read = []
            else:
                read.append(turn.token_ids)
    return list(rollout.states) if len(rollout.states) == len(observed) else observed


def with_turn_advantages(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], train: TrainSection, weights: Mapping[str, float]
) -> list[Group]:
    """The groups with an advantage for each turn of the model, where its source gave none, by `train.credit`."""
    chosen = [
        (g, i)
        for g, group in enumerate(groups)
        for i, rollout in enumerate(group.rollouts)
        if rollout.error is None and rollout.advantages is None and rollout.model_turns
    ]
    rollouts, members = [groups[g].rollouts[i] for g, i in chosen], [g for g, _ in chosen]
    rewards = [turn_rewards(rollout, weights) for rollout in rollouts]
    if train.credit == "gigpo":
        found = gigpo_advantages(
            [advantages[g][i] for g, i in chosen],
            rewards,
            [states_of(rollout) for rollout in rollouts],
            members,
            discount=train.discount,
            step_weight=train.step_weight,
            scale=train.advantage_scale,
        )
    else:
        found = return_advantages(rewards, members, discount=train.discount, scale=train.advantage_scale)
    values = {place: iter(row.tolist()) for place, row in zip(chosen, found, strict=True)}

    def changed(g: int, i: int, rollout: Rollout) -> Rollout:
        if (left := values.get((g, i))) is None:
            return rollout

        def column(conversation: Rollout | Lineage) -> Array:
            turns = conversation.turns
            parts = [np.full(len(t.token_ids), next(left) if t.maker == "model" else 0.0, np.float32) for t in turns]
            return np.concatenate([np.zeros(0, np.float32), *parts])

        return _with_columns(rollout, column)

    return _changed(groups, changed)


def with_custom_advantages(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    train: TrainSection,
    weights: Mapping[str, float],
    function: AdvantageFunction,
) -> list[Group]:
    """Call the function on the batch of all groups, and give each rollout its part of the result."""
    batch = to_batch(groups, advantages, mask_truncated=train.mask_truncated)
    step = [(rollout, own) for group in groups for rollout in group.rollouts for own in rollout.conversations]
    rows = [step[number] for number in batch.conversations.tolist()]
    # [T] the number of each token's turn in its rollout, and the reward of that turn
    numbers: list[Array] = [np.zeros(0, np.int32)]
    rewards: list[Array] = [np.zeros(0, np.float32)]
    for rollout, conversation in rows:
        places = {id(turn): k for k, turn in enumerate(rollout.model_turns)}
        earned = turn_rewards(rollout, weights)
        for turn in conversation.turns:
            k = places.get(id(turn), -1)
            numbers.append(np.full(len(turn.token_ids), k, np.int32))
            rewards.append(np.full(len(turn.token_ids), earned[k] if k >= 0 else 0.0, np.float32))
    batch.rewards = np.array([rollout.reward for rollout, _ in rows], np.float64)
    batch.turns, batch.turn_rewards = np.concatenate(numbers), np.concatenate(rewards)
    column = custom_advantages(function, batch)
    parts = {id(own): part for (_, own), part in zip(rows, batch.split(column), strict=True)}

    def changed(g: int, i: int, rollout: Rollout) -> Rollout:
        if not any(id(conversation) in parts for conversation in rollout.conversations):
            return rollout
        return _with_columns(rollout, lambda c: parts.get(id(c), np.zeros(_size(c), np.float32)))

    return _changed(groups, changed)


def custom_advantages(function: AdvantageFunction, batch: Batch) -> Array:
    """[T] float32 what a user's function gives for a batch; PalestraError where that cannot be advantages."""
    name = f"the advantage function {getattr(function, '__name__', function)}"
    try:
        found = function(batch)
        found = found.detach().cpu().numpy() if hasattr(found, "detach") else found
        values = np.array(found, dtype=np.float64)
    except Exception as error:
        raise UserCodeError(f"{name} raised {text_of(error)}") from error
    rows, tokens = batch.rows, len(batch.token_ids)
    if values.shape not in ((rows,), (tokens,)):
        raise UserCodeError(
            f"{name} gave an array of shape {list(values.shape)} for {rows} rows with {tokens} tokens; expected "
            f"[{rows}], one number a row, or [{tokens}], one a token"
        )
    if len(bad := np.flatnonzero(~np.isfinite(values))):
        what = "row" if values.shape == (rows,) else "token"
        raise UserCodeError(f"{name} gave {values[bad[0]]} for {what} {bad[0]}; expected finite numbers")
    column: Array = (values if values.shape == (tokens,) else np.repeat(values, batch.lengths)).astype(np.float32)
    return column
