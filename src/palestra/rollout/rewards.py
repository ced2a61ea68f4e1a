"""From scores to rewards: the measures' weighted sum, plus reward functions of TRL's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.messages import to_dict
from palestra.core.types import Message, Problem, Rollout
from palestra.envs.base import Episode

# TRL's form: (prompts, completions, **columns) -> one float a rollout.
RewardFunction = Callable[..., Sequence[float]]


def reward_group(
    problem: Problem,
    rollouts: Sequence[Rollout],
    episodes: Sequence[Episode],
    weights: Mapping[str, float],
    functions: Sequence[RewardFunction] = (),
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[Rollout, ...]:
    """The siblings with their rewards. Episodes are still open, so functions may look at what was played with."""
    rewards = [weighted_reward(r, weights) for r in rollouts]
    worlds = [e.environment for e in episodes if hasattr(e, "environment")]  # not every environment has such a thing
    for function in functions:
        extra = dict(columns or {}) | ({"environments": worlds} if worlds else {})
        values = call_reward_function(function, problem, rollouts, extra)
        rewards = [a + b for a, b in zip(rewards, values, strict=True)]
    errors = [r.error or failed_measure(r, weights) for r in rollouts]
    return tuple(replace(r, reward=x, error=e) for r, x, e in zip(rollouts, rewards, errors, strict=True))


def failed_measure(rollout: Rollout, weights: Mapping[str, float]) -> str | None:
    """Why the reward is not known: a measure that counts has failed, which is not the model's doing."""
    return next((s.reason for name, s in rollout.scores.items() if s.error and weights.get(name, 1.0)), None)


def weighted_reward(rollout: Rollout, weights: Mapping[str, float]) -> float:
    """The measures' values, weighed and added; a rollout that failed earns nothing."""
    return sum(weights.get(name, 1.0) * score.value for name, score in rollout.scores.items())


def call_reward_function(
    function: RewardFunction,
    problem: Problem,
    rollouts: Sequence[Rollout],
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> list[float]:
    """Call a TRL-style reward function for one group. `extra` has more columns, with a value a rollout."""
    name = getattr(function, "__name__", repr(function))
    prompts = [_dicts(r.messages[: _prompt_count(r)]) for r in rollouts]
    completions = [_dicts(r.messages[_prompt_count(r) :]) for r in rollouts]
    columns = {
        key: [value] * len(rollouts) for key, value in problem.row.items() if key not in ("prompts", "completions")
    }
    columns |= {key: list(values) for key, values in (extra or {}).items()}
    try:
        values = [float(v) for v in function(prompts=prompts, completions=completions, **columns)]
    except Exception as error:
        raise PalestraError(f"reward function {name} raised {type(error).__name__}: {error}") from error
    if len(values) != len(rollouts):
        raise PalestraError(
            f"reward function {name} gave {len(values)} values for {len(rollouts)} completions; return one each"
        )
    return values


def _prompt_count(rollout: Rollout) -> int:
    return next((i for i, m in enumerate(rollout.messages) if m.role == "assistant"), len(rollout.messages))


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [to_dict(message) for message in messages]
