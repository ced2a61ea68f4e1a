"""A suite as an environment: its cases are the problems, the agent's tools the tools, its measures the score.

Also TRL-style environments over the cases of a suite: a class whose `reset` begins an attempt, whose public methods
are tools, and which may know its own reward.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from palestra.agents.agent import Agent
from palestra.agents.tools.mcp_client import McpConnection, McpTools, close_connections
from palestra.agents.tools.tool import Tool, as_tool, shared_state, tools_by_name
from palestra.core.calls import Lane, call_user_code
from palestra.core.errors import InputError, PalestraError, SettingError, UserCodeError, did_you_mean
from palestra.core.messages import as_messages
from palestra.core.types import Message, Problem, ProgramResult, Score, ToolResult
from palestra.envs.base import Environment, Split
from palestra.envs.env import Env
from palestra.evals.measures import Measure, MeasureContext, as_measures, run_group_measure, run_measure
from palestra.evals.suite import EvalSuite, SimulatedUser

MEASURE_TIMEOUT_S = 300.0
USER_TIMEOUT_S = 3600.0  # a simulated user may wait for a rate limit
log = logging.getLogger("palestra")
_IMMUTABLE = (type(None), str, int, float, tuple, frozenset)


@dataclass
class SuiteEpisode:
    """One attempt at one case."""

    problem: Problem
    prompt: Sequence[Message]
    tools: Sequence[Tool]
    measures: Sequence[Measure]
    environment: Any = None  # the context of the attempt; reward functions see it by this name
    connections: Sequence[McpConnection] = ()
    program: ProgramResult | None = None  # of an agent that is a program, once it has ended
    user: SimulatedUser | None = None
    attempt: MeasureContext | None = None  # once it has ended
    # conversations of a program's labelled agents
    agents: Mapping[str, Sequence[Message]] = field(default_factory=dict)
    roles: Sequence[str] = ()  # agents that a measure may score by name
    lane: Lane | None = None

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """End the attempt after the answer, unless a simulated user continues."""
        if self.user is None:
            return ()
        arguments = (messages, self.problem)
        text = await call_user_code("the simulated user", self.user.reply, *arguments, limit_s=USER_TIMEOUT_S)
        return () if text is None else (Message("user", text),)

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        """Run all measures of single attempts concurrently."""
        case, results = self.problem, tuple(tool_results)
        self.attempt = context = MeasureContext(
            tuple(messages), results, case.expect, case, self.environment, self.program, self.agents
        )
        measures = [m for m in self.measures if not m.group]
        scores = await asyncio.gather(*(run_measure(m, context, MEASURE_TIMEOUT_S) for m in measures))
        known = f"the agents are {', '.join(self.roles)}" if self.roles else "this agent has no roles (agent.roles)"
        checked = {}
        for name, score in zip((m.name for m in measures), scores, strict=True):
            unknown = next((role for role in score.roles if role not in self.roles), None)
            wrong = f"measure {name} returned a verdict for {unknown!r}; {known}"
            checked[name] = score if unknown is None else Score(0.0, False, wrong, error=True)
        return checked

    @property
    def state_key(self) -> Any:
        """The `state_key` of the attempt's context, if it has one."""
        return getattr(self.environment, "state_key", None)

    def close(self) -> None:
        """End the MCP servers that are this attempt's own."""
        if self.connections:
            close_connections(self.connections)


class SuiteEnvironment:
    """The problems of a suite (and of a held-out one), for one agent."""

    def __init__(
        self,
        agent: Agent,
        train: EvalSuite,
        held_out: EvalSuite | None = None,
        measures: Sequence[Any] | None = None,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        *,
        measures_required: bool = True,
    ) -> None:
        """`measures` default to the suite's own, `reward_weights` to equal ones that add up to 1.

        Without `measures_required`, something else gives the reward.
        """
        self._measures = as_measures(train.measures if measures is None else measures)
        if not self._measures and measures_required:
            raise InputError(
                f"there are no measures for the suite {train.name!r}, so nothing tells good from bad. Declare one with "
                "@measure and pass it: EvalSuite.from_records(…, measures=[right_answer])."
            )
        instructions = agent.fixed_instructions
        self._opening = (Message("system", instructions),) if instructions else ()
        self._tools: tuple[Tool, ...] = tuple(agent.tools)
        self._mcp = McpTools(agent.mcp_servers)
        self._suite = train if train.context_fn or held_out is None else held_out
        self._suite_user = train.user or (held_out.user if held_out is not None else None)
        self._context: Any = None  # of the last attempt
        for tool in self._tools:
            if tool.needs_context and self._suite.context_fn is None:
                raise InputError(
                    f"tool {tool.name!r} takes a context, and the suite makes none. Say how: "
                    "EvalSuite.from_records(…, context_fn=lambda record: …)"
                )
            if names := shared_state(tool.fn):
                text = "tool %s changes %s, which all attempts share, so they disturb each other. Keep the state of an "
                log.warning(text + "attempt in a context: docs/python.md", tool.name, ", ".join(names))
        self._cases = {"train": tuple(train), "held_out": tuple(held_out or ())}
        self._weights = _weights([m.name for m in self._measures], reward_weights)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_context": None}  # of an attempt in this process

    @property
    def keeps_state(self) -> bool:
        """Whether an attempt has a lane: if it has a context."""
        return self._suite.context_fn is not None

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self._weights

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._cases[split]

    def open(self, problem: Problem) -> SuiteEpisode:
        context = self._suite.context_of(problem)
        if context is self._context and not isinstance(context, _IMMUTABLE):
            raise UserCodeError("context_fn gave the same object twice; make a new one for each attempt")
        self._context = context
        connections = self._mcp.open()
        served = [tool for connection in connections for tool in connection.tools]
        try:
            tools = tuple(tools_by_name([*(tool.bind(context) for tool in self._tools), *served]).values())
        except PalestraError:
            close_connections(connections)
            raise
        prompt = (*self._opening, *as_messages(problem.input))
        return SuiteEpisode(problem, prompt, tools, self._measures, context, connections, user=self._suite_user)

    async def score_group(self, episodes: Sequence[SuiteEpisode]) -> list[dict[str, Score]] | None:
        """The verdicts of measures that compare the attempts at a case; None where there are none."""
        return await self.compare([episode.attempt for episode in episodes if episode.attempt is not None])

    async def compare(self, attempts: Sequence[MeasureContext]) -> list[dict[str, Score]] | None:
        measures = [m for m in self._measures if m.group]
        if not measures:
            return None
        columns = await asyncio.gather(*(run_group_measure(m, attempts, MEASURE_TIMEOUT_S) for m in measures))
        names = [m.name for m in measures]
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def close(self) -> None:
        """End the MCP servers that all attempts share."""
        self._mcp.close()


def _weights(names: Sequence[str], weights: Sequence[float] | Mapping[str, float] | None) -> dict[str, float]:
    """One weight per measure; measures that a mapping does not name get weight 0."""
    if weights is None:
        return {name: 1.0 / len(names) for name in names}
    if isinstance(weights, Mapping):
        for name in weights:
            if name not in names:
                raise SettingError(
                    f"reward_weights names {name!r}, which is no measure here.{did_you_mean(name, names)} "
                    f"The measures are: {', '.join(names)}."
                )
        result = {name: float(weights.get(name, 0.0)) for name in names}
    else:
        if len(weights) != len(names):
            raise SettingError(
                f"reward_weights has {len(weights)} values for {len(names)} measures ({', '.join(names)}); "
                "give one each"
            )
        result = {name: float(weight) for name, weight in zip(names, weights, strict=True)}
    if not all(math.isfinite(weight) for weight in result.values()) or not any(result.values()):
        raise SettingError(f"reward_weights are {result}; expected finite numbers, and at least one that is not 0")
    return result


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
        episode = await call_user_code("opening a case", self._cases.open, self.problem, limit_s=MEASURE_TIMEOUT_S)
        scores: dict[str, Any] = dict(await episode.score(self.messages, self.tool_results))
        get_reward = getattr(self.environment, "get_reward", None)
        if get_reward is not None:
            reward = await call_user_code("get_reward", get_reward, limit_s=MEASURE_TIMEOUT_S, then=float)
            scores[type(self.environment).__name__] = reward
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
