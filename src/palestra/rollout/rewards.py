"""From scores to rewards: the measures' weighted sum, plus reward functions of TRL's form and reward models."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from palestra.core.calls import call_user_code
from palestra.core.errors import RolloutError, UserCodeError
from palestra.core.messages import prompt_length, to_dict
from palestra.core.types import Group, Message, Problem, Rollout, Score
from palestra.envs.base import Episode

# TRL's form: (prompts, completions, completion_ids, **columns) -> a number for each rollout, or None where it does
# not apply; sync or async. Or an object with calculate_combined_reward(output, expected_answer).
RewardFunction = Callable[..., Any]
RewardFunctionList = RewardFunction | Sequence[RewardFunction] | None

REWARD_TIMEOUT_S = 300.0
_BROKEN_AFTER = 4  # calls, none of which succeeded

log = logging.getLogger("palestra")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Progress of the training, passed to reward functions as `trainer_state`."""

    global_step: int = 0  # updates so far
    max_steps: int = 0
    epoch: float = 0.0
    log_history: tuple[Mapping[str, float], ...] = ()  # the metrics of each step; only `trainer.state` has them

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]], max_steps: int) -> TrainerState:
        """The state after the steps of `rows`; each row also has the reward and its spread by TRL's names."""
        same = {"reward": "reward_mean", "completions/mean_length": "completion_length_mean"}
        history = tuple(dict(row) | {new: row[own] for new, own in same.items() if own in row} for row in rows)
        last = rows[-1] if rows else {}
        return cls(int(last.get("step", 0)), max_steps, float(last.get("epoch", 0.0)), history)


class RewardFunctions:
    """Reward functions, each under a name of its own. Their values are scores beside those of the measures.

    One that raises is left out for that group, with a warning; one that has raised in every call stops the run.
    """

    def __init__(
        self,
        functions: RewardFunctionList = (),
        *,
        measures: Iterable[str] = (),
        state: Callable[[], TrainerState] = TrainerState,
    ) -> None:
        self._functions: dict[str, RewardFunction] = {}
        for function in as_list(functions):
            if not callable(getattr(function, "calculate_combined_reward", function)):
                raise UserCodeError(
                    f"{function!r} is not a reward function; expected one of TRL's form, (prompts, completions, "
                    "**columns) -> numbers, or an object with calculate_combined_reward(output, expected_answer)"
                )
            taken = {*measures, *self._functions}
            name = getattr(function, "__name__", type(function).__name__)
            numbers = (f"{name}_{i}" for i in range(2, len(taken) + 3))
            self._functions[name if name not in taken else next(n for n in numbers if n not in taken)] = function
        self._state = state
        self._locks = {name: threading.Lock() for name in self._functions}  # one call at a time, as in TRL
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    async def reward(
        self,
        problem: Problem,
        rollouts: Sequence[Rollout],
        episodes: Sequence[Episode],
        weights: Mapping[str, float],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> Group:
        """The siblings with their rewards. Episodes are still open, so functions may look at what was played with."""
        scored = list(rollouts)
        metrics: dict[str, list[float]] = {}  # of the step, that functions log
        extras: dict[str, dict[str, list[str]]] = {}  # texts about each rollout, by function and column
        good = [i for i, rollout in enumerate(rollouts) if rollout.error is None]
        if good and self._functions:
            arguments = self._arguments(problem, [rollouts[i] for i in good], [episodes[i] for i in good])
            arguments |= {key: [values[i] for i in good] for key, values in (columns or {}).items()}
            arguments["log_metric"] = lambda name, value: metrics.setdefault(name, []).append(float(value))
            calls = (self._call(name, arguments, problem, extras.setdefault(name, {})) for name in self._functions)
            for name, values in zip(self._functions, await asyncio.gather(*calls), strict=True):
                for at, (i, value) in enumerate(zip(good, values, strict=True)):
                    if value is None:
                        continue
                    if isinstance(value, str):
                        score = Score(0.0, None, value, error=True)
                    else:  # beside measures, which say what passes, a function only adds to the reward
                        texts = [f"{column}: {said[at]}" for column, said in extras[name].items() if at < len(said)]
                        passed = None if rollouts[i].scores else value >= 1.0
                        score = Score(value, passed, ", ".join(texts) or f"{value:.4g}")
                    scored[i] = replace(scored[i], scores={**scored[i].scores, name: score})
        rewarded = [self._rewarded(rollout, weights) for rollout in scored]
        means = {}
        for name, logged in metrics.items():
            means[name] = fmean(logged)
        return Group(problem.id, tuple(rewarded), means)

    def require_working(self) -> None:
        """Raise if a function has never succeeded: its reward is missing from everything that was learned."""
        for name, failures in self._failures.items():
            if failures == self._calls[name] >= _BROKEN_AFTER:
                raise UserCodeError(
                    f"the reward function {name} has failed in all of its {failures} calls; see the warning above for "
                    "the first one. Fix it, or leave it out of extra_reward_funcs"
                )

    def _arguments(
        self, problem: Problem, rollouts: Sequence[Rollout], episodes: Sequence[Episode]
    ) -> dict[str, Sequence[Any] | Any]:
        """Arguments of TRL's reward functions, and the columns of the problem's row."""
        worlds = [w for e in episodes if (w := getattr(e, "environment", None)) is not None]  # not all have one
        return {
            **{key: [value] * len(rollouts) for key, value in problem.row.items()},
            "prompts": [_dicts(r.messages[: prompt_length(r.messages)]) for r in rollouts],
            "completions": [_dicts(r.messages[prompt_length(r.messages) :]) for r in rollouts],
            "completion_ids": [[i for turn in r.turns[1:] for i in turn.token_ids.tolist()] for r in rollouts],
            "trainer_state": self._state(),
            **({"environments": worlds} if worlds else {}),
        }

    async def _call(
        self, name: str, arguments: Mapping[str, Any], problem: Problem, extras: dict[str, list[str]]
    ) -> list[float | None] | list[str]:
        """A value for each rollout; the reason for each where the function failed."""
        count = len(arguments["completions"])

        def log_extra(column: str, values: Sequence[Any]) -> None:
            extras[column] = [str(value) for value in values]

        self._calls[name] += 1

        def as_numbers(values: Iterable[Any]) -> list[float | None]:
            numbers = [None if v is None else float(v) for v in values]
            if len(numbers) != count:
                raise ValueError(f"it gave {len(numbers)} values for {count} completions; return one each")
            if wrong := [v for v in numbers if v is not None and not math.isfinite(v)]:
                raise ValueError(f"it gave {wrong[0]}; return finite numbers, or None where it does not apply")
            return numbers

        try:
            passed = name, {**arguments, "log_extra": log_extra}, problem
            numbers: list[float | None] = await call_user_code(
                f"reward function {name}", self._locked, *passed, limit_s=REWARD_TIMEOUT_S, then=as_numbers
            )
            return numbers
        except RolloutError as error:
            self._failures[name] += 1
            if self._failures[name] == 1:
                log.warning("%s; it is left out for that group, and such groups are counted as measure_errors", error)
            return [str(error)] * count

    def _locked(self, name: str, arguments: Mapping[str, Any], problem: Problem) -> Any:
        """Call a function with the arguments that it has parameters for."""
        function = self._functions[name]
        with self._locks[name]:
            if (combined := getattr(function, "calculate_combined_reward", None)) is not None:
                answers = [[m["content"] for m in c if m["role"] == "assistant"] for c in arguments["completions"]]
                return [combined(str(texts[-1]) if texts else "", problem.expect) for texts in answers]
            try:
                parameters = inspect.signature(function).parameters.values()
            except (TypeError, ValueError):
                return function(**arguments)
            takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
            names = arguments if takes_all else [p.name for p in parameters if p.name in arguments]
            return function(**{name: arguments[name] for name in names})

    def _rewarded(self, rollout: Rollout, weights: Mapping[str, float]) -> Rollout:
        """The rollout with its reward. A measure that counts and has failed, which is no fault of the model, is its
        error, and so is that none was run."""
        scores: dict[str, Score] = {}
        parts, failed = [], None
        has_measures = is_scored = False
        for name, score in rollout.scores.items():
            score, weight = _for_each_turn(name, score, rollout), weights.get(name, 1.0)
            scores[name] = score if weight else replace(score, counts=False)
            parts.append(weight * score.value)
            is_scored |= not score.error
            if name not in self._functions:
                has_measures = True
                if score.error and weight and failed is None:
                    failed = score.reason
        if failed is None and not has_measures and self._functions and not is_scored:
            failed = next((s.reason for s in scores.values()), "no measure and no reward function scored it")
        return replace(rollout, reward=sum(parts), scores=scores, error=rollout.error or failed)


def as_list(functions: Any) -> tuple[RewardFunction, ...]:
    """None, one function or several."""
    return () if functions is None else tuple(functions) if isinstance(functions, Iterable) else (functions,)


def _for_each_turn(name: str, score: Score, rollout: Rollout) -> Score:
    """The score, unless it has values of turns and not one for each: then it is no verdict."""
    count = len(rollout.model_turns) if score.turns and rollout.turns else len(score.turns)
    if len(score.turns) == count:
        return score
    summaries = rollout.info.get("summaries", ())
    if len(score.turns) == count - len(summaries):  # summaries of its history are turns that an environment never sees
        left = iter(score.turns)
        return replace(score, turns=tuple(0.0 if k in summaries else next(left) for k in range(count)))
    reason = f"{name} gave {len(score.turns)} values for {count} turns of the model; give one for each"
    return replace(score, value=0.0, passed=False, reason=reason, error=True, turns=())


MAIN_ROLE = "main"  # by which measures call the agent without a label


def role_score(score: Score, role: str) -> float:
    """A measure's value for one agent: the attempt's value, unless the measure scores agents separately."""
    return score.roles.get(role or MAIN_ROLE, 0.0) if score.roles else score.value


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [to_dict(message) for message in messages]
