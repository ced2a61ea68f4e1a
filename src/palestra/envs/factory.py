"""TRL-style environments: a class whose `reset` begins an attempt, whose public methods are tools, and which may know
its own reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from palestra.agents.tools.tool import as_tool
from palestra.core.errors import InputError, SettingError, did_you_mean
from palestra.core.types import Problem
from palestra.envs.base import Environment, Split
from palestra.envs.env import Env
from palestra.evals.measures import MeasureContext

Factory = Callable[[], Any]
_NO_TOOLS = ("reset", "get_reward", "state_key", "close")


class FactoryEnv(Env):
    """One new instance of the factory's class for each attempt, over problems from elsewhere.

    With a dict of factories, the field `environment` of a problem's row chooses.
    """

    name = "factory"
    scores_are_bounded = False

    def __init__(self, factory: Factory | Mapping[str, Factory], cases: Environment, instructions: str = "") -> None:
        """`cases` gives the problems, their opening messages, and whatever measures score them besides."""
        super().__init__()
        self._factory = factory
        self._cases = cases
        self.instructions = instructions
        self.environment: Any = None  # the instance of this attempt

    def setup(self) -> None:
        """Make one instance of each, so that an error is raised before training."""
        factories = self._factory.values() if isinstance(self._factory, Mapping) else [self._factory]
        for factory in factories:
            instance = factory()
            if not callable(getattr(instance, "reset", None)):
                raise InputError(f"{type(instance).__name__} has no method reset(); an environment_factory needs one")
            for method in _methods(instance):
                as_tool(method)
            with suppress(Exception):  # it may count on a reset() that there was none of
                _close(instance)

    @property
    def reward_weights(self) -> Mapping[str, float]:  # type: ignore[override]
        return self._cases.reward_weights

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._cases.problems(split)

    def start(self) -> str | None:
        row = dict(self.problem.row)
        factory = self._factory
        if isinstance(factory, Mapping):
            name = row.pop("environment", None)
            if name not in factory:
                near = did_you_mean(str(name), factory)
                raise SettingError(f"the case has environment={name!r}, expected one of {', '.join(factory)}.{near}")
            factory = factory[name]
        self.environment = factory()
        observation = self.environment.reset(**row)
        return None if observation is None else str(observation)

    def tools(self) -> Sequence[Any]:
        return _methods(self.environment)

    async def score(self, answer: str) -> dict[str, Any]:
        episode = self._cases.open(self.problem)
        scores: dict[str, Any] = dict(await episode.score(self.messages, self.tool_results))
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is not None:
            reward = get_reward()
            scores[type(self.environment).__name__] = float(await reward if inspect.isawaitable(reward) else reward)
        return scores

    async def score_group(self, attempts: Sequence[Any]) -> Any:
        compare = getattr(self._cases, "compare", None)
        if compare is None:
            return None
        return await compare(
            [MeasureContext(a.messages, a.tool_results, a.problem.expect, a.problem) for a in attempts]
        )

    def state_key(self) -> Any:
        method = getattr(self.environment, "state_key", None)
        return method() if callable(method) else None

    def close(self) -> None:
        _close(self.environment)


def owns_reward(factory: Factory | Mapping[str, Factory]) -> bool:
    """Whether the environments score themselves, so that no measure is needed."""
    factories = factory.values() if isinstance(factory, Mapping) else [factory]
    return all(hasattr(f if isinstance(f, type) else f(), "get_reward") for f in factories)


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The public methods of an instance's class, in the order of their names."""
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if not name.startswith("_") and name not in _NO_TOOLS]


def _close(instance: Any) -> None:
    close = getattr(instance, "close", None)
    if callable(close):
        close()
