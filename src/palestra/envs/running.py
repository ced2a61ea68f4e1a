"""Runs a subclass of Env as the Environment that the rollout loop drives. What its methods raise fails one attempt.

Episodes are opened and closed within time limits: user code may start a program or call a server for each. Where an
environment `keeps_state`, each of its episodes has a lane, in which all of its user code runs.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

from palestra.agents.tools.tool import Tool, as_tool, tools_by_name
from palestra.core.calls import Lane, call_user_code, in_lane, user_code
from palestra.core.errors import CallTimeout, PalestraError, RolloutError, ServiceError, UserCodeError, text_of
from palestra.core.messages import as_messages, with_text
from palestra.core.text import shorten
from palestra.core.time_limit import outside_event_loop
from palestra.core.types import Message, Problem, Score, ToolResult
from palestra.envs.base import Environment, Episode, Split
from palestra.envs.env import Env, ProblemList, env_name, problem_list, tool_methods
from palestra.evals.measures import Measure, as_score
from palestra.models.chat.toolcalls import strip_reasoning

STEP_TIMEOUT_S = 300.0
MAX_OWN_ITEMS = 10_000  # of the containers in an attribute, to be copied for each attempt
NAMED_AFTER_S = 60.0  # a method that the run waits for
PROBATION = 16  # attempts with tool calls and without state after which further ones get no lane
_OURS = ("problem", "messages", "tool_results")  # attributes of an attempt that we set
log = logging.getLogger("palestra")


@dataclass
class EnvEpisode:
    """One attempt, on a copy of the environment that is its own."""

    env: Env
    prompt: Sequence[Message]
    tools: Sequence[Tool]
    error: str | None  # it could not begin: the attempt fails as soon as the model has spoken
    on_close: Callable[[Env], None]
    lane: Lane | None = None

    @property
    def max_turns(self) -> int | None:
        return self.env.max_turns

    @property
    def environment(self) -> Any:
        """The object that reward functions see: the attempt's own copy, or the environment of an adapter."""
        return getattr(self.env, "environment", self.env)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        if type(self.env).step is Env.step and not self.error:  # most environments answer nothing
            return ()
        where, then = "the environment's reply", lambda reply: () if reply is None else as_messages(reply)
        replies: Sequence[Message] = await self._call(where, self.env.step, messages, then)
        return replies

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        self.env.tool_results = tuple(tool_results)
        scores: Mapping[str, Score] = await self._call("scoring", self.env.score, messages, self.as_scores)
        if type(self.env).score_turns is Env.score_turns:
            return scores
        of_turns = await call_user_code(
            "score_turns", self.env.score_turns, limit_s=STEP_TIMEOUT_S, then=self._scores_of_turns
        )
        return {**scores, **of_turns}

    def _scores_of_turns(self, of_turns: Any) -> dict[str, Score]:
        by_name = {} if of_turns is None else of_turns if isinstance(of_turns, Mapping) else {"turns": of_turns}
        return {name: as_score(Measure(name, self.env.score_turns), v) for name, v in by_name.items()}

    @property
    def state_key(self) -> Callable[[], Any] | None:
        return None if type(self.env).state_key is Env.state_key else self.env.state_key

    def as_scores(self, verdict: Any) -> Mapping[str, Score]:
        """Convert what `score` or `score_group` returned to scores by name."""
        verdicts = verdict if isinstance(verdict, Mapping) else {"score": verdict}
        threshold, scores = self.env.pass_threshold, dict[str, Score]()
        for name, value in verdicts.items():
            if self.env.scores_are_bounded or isinstance(value, Score):
                scores[name] = as_score(Measure(name, self.env.score, threshold), value)
            elif math.isfinite(reward := float(value)):
                scores[name] = Score(reward, reward >= threshold - 1e-9)
            else:
                raise RolloutError(f"the reward is {reward}; expected a finite number")
        return scores

    def close(self) -> None:
        try:
            with user_code():
                self.on_close(self.env)
                self.env.close()
        except Exception as error:
            log.warning("%s", text_of(error, f"{type(self.env).__name__}.close"))

    async def _call(
        self, where: str, method: Callable[[str], Any], messages: Sequence[Message], then: Callable[[Any], Any]
    ) -> Any:
        if self.error:
            raise RolloutError(self.error)
        self.env.messages = tuple(messages)
        answer = strip_reasoning(next((m.text for m in reversed(messages) if m.role == "assistant"), ""))
        return await call_user_code(where, method, answer, limit_s=STEP_TIMEOUT_S, then=then)


class RunningEnv:
    """An Env that is set up and hands out problems and attempts."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.name = env_name(type(env))
        self.max_text_chars = 20_000  # of `start`; set to rollout.max_tool_result_chars by what plays the attempts
        # a tool without docstring or type hints is refused now, not in every attempt
        self._untried = {as_tool(getattr(env, method)).name for method in tool_methods(type(env))}
        own = {name: value for name, value in vars(env).items() if 0 < _items(value) <= MAX_OWN_ITEMS}
        self._required("setup", env.setup)
        self._own = [name for name, value in own.items() if vars(env).get(name) is value]  # not of `setup`
        self._without_state = 0  # attempts so far that called tools and left nothing on their copies
        self._has_state = type(env).tools is not Env.tools  # or an attempt left something

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.env.reward_weights

    @property
    def max_episodes(self) -> int | None:
        return self.env.max_episodes

    @property
    def works_in_forks(self) -> bool:
        return self.env.works_in_forks

    @property
    def keeps_state(self) -> bool:
        """Whether the next attempts have lanes: until enough of them have left no state, and each tool was called."""
        is_proven = self._without_state >= PROBATION and not self._untried
        return self._has_hooks and (self._has_state or not is_proven)

    @cached_property
    def _has_hooks(self) -> bool:
        """Whether anything of an attempt is called between the problem and its score."""
        cls, hooks = type(self.env), ("start", "tools", "step", "state_key", "close")
        return bool(tool_methods(cls)) or any(getattr(cls, hook) is not getattr(Env, hook) for hook in hooks)

    def _look_for_state(self, env: Env) -> None:
        """Judge an attempt that ends: its copy has state where an attribute is not that of the shared environment.

        One that called no tool proves nothing: a tool may open a connection when it is first called.
        """
        shared = vars(self.env)
        self._untried.difference_update(result.call.name for result in env.tool_results)
        self._without_state += bool(env.tool_results) or not tool_methods(type(env))
        try:
            self._has_state = self._has_state or any(
                name not in shared or (value != shared[name] if name in self._own else value is not shared[name])
                for name, value in vars(env).items()
                if name not in _OURS
            )
        except Exception:  # the user's objects compare
            self._has_state = True

    @cached_property
    def _problems(self) -> dict[Split, ProblemList]:
        sizes: dict[Split, int] = {
            "held_out": getattr(self.env.config, "held_out_size", 100),
            "train": getattr(self.env.config, "train_size", 1000),
        }
        return {
            split: self._required("problems", lambda split=split, n=n: problem_list(self.env.problems(split), split, n))
            for split, n in sizes.items()
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        problems = self._problems[split]
        if split == "train" and not problems:
            raise UserCodeError(f"the environment {self.name} gave no problems to train on")
        return problems

    def open(self, problem: Problem) -> EnvEpisode:
        env, prompt = self.env, list(as_messages(problem.input))
        tools: Sequence[Tool] = ()
        error = problem.error
        try:
            with user_code():
                env = copy.copy(self.env)
                for name in self._own:
                    setattr(env, name, _own_copy(getattr(self.env, name), {}))
                env.problem, env.messages, env.tool_results = problem, (), ()
                if error is None:
                    if (text := env.start()) is not None:
                        prompt = with_text(prompt, shorten(str(text), self.max_text_chars))
                    tools = tuple(tools_by_name(as_tool(tool) for tool in env.tools()).values())
                if env.instructions:
                    prompt.insert(0, Message("system", env.instructions))
        except Exception as failure:
            error = text_of(failure, "beginning an attempt")
        return EnvEpisode(env, prompt, tools, error, self._look_for_state)

    async def score_group(self, episodes: Sequence[EnvEpisode]) -> list[Mapping[str, Score]] | None:
        """The scores of siblings that are judged together; None where each is scored alone."""
        if type(self.env).score_group is Env.score_group:
            return None

        def by_attempt(verdicts: Any) -> list[Mapping[str, Score]] | None:
            if verdicts is None:
                return None
            count = len(episodes)
            if len(verdicts) != count:
                raise RolloutError(f"score_group gave {len(verdicts)} scores for {count} attempts; return one each")
            return [episode.as_scores(verdict) for episode, verdict in zip(episodes, verdicts, strict=True)]

        attempts = [episode.env for episode in episodes]
        scores: list[Mapping[str, Score]] | None = await call_user_code(
            "score_group", self.env.score_group, attempts, limit_s=STEP_TIMEOUT_S, then=by_attempt
        )
        return scores

    def _required(self, method: str, call: Any) -> Any:
        """Call a method that the run needs before any attempt, which may take long; what it raises ends the run."""
        name = f"{type(self.env).__name__}.{method}"
        slow = threading.Timer(NAMED_AFTER_S, log.warning, ["%s has not returned for %g s", name, NAMED_AFTER_S])
        slow.daemon = True
        slow.start()
        try:
            with user_code():
                return call()
        except PalestraError:
            raise
        except Exception as error:
            raise UserCodeError(f"{name} raised {text_of(error)}") from error
        finally:
            slow.cancel()


_CONTAINERS = (list, dict, set, deque)


def _items(value: Any) -> int:
    """The number of items in a container and in those that it holds, counted up to the limit, plus 1; 0: it is none."""
    count, left = 0, [value]
    while left and count <= MAX_OWN_ITEMS:
        if isinstance(container := left.pop(), _CONTAINERS):
            count += 1 + len(container)
            left += container.values() if isinstance(container, dict) else container
    return count


def _own_copy(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a container and of the containers in it; what else they hold is shared."""
    if not isinstance(value, _CONTAINERS):
        return value
    if id(value) not in copies:
        copies[id(value)] = made = copy.copy(value)
        if isinstance(made, dict | list | deque):
            for key, item in made.items() if isinstance(made, dict) else enumerate(made):
                made[key] = _own_copy(item, copies)
    return copies[id(value)]


OPEN_LIMIT_S = 300.0  # an environment may start a container
CLOSE_LIMIT_S = 60.0
QUICK_S, SLOW_S = 0.001, 0.02


class OpenTimeout(ServiceError):
    """An environment does not open an episode in time."""


@dataclass(frozen=True, slots=True)
class NotOpened:
    """Reason the episodes of a problem failed to open."""

    reason: str
    error: BaseException | None = None


class Opener:
    """Opens the episodes of one environment, which may start a program or call a server for each: each in its lane or
    in a thread, or one after the other in one thread, where the last ones took less time than it takes to hand a
    thread a call.

    Judged by the median: on a busy machine a quick one takes a few milliseconds now and then.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.is_quick = False

    async def open(self, problem: Problem, count: int, limit_s: float | None = None) -> list[Episode] | NotOpened:
        """Open all episodes, or close any that opened and return the reason."""
        episodes: list[Episode] = []
        seconds: list[float] = []  # that each took
        lock, abandoned = threading.Lock(), threading.Event()

        def open_one(lane: Lane | None = None) -> None:
            began = time.perf_counter()
            episode: Any = self._environment.open(problem)
            seconds.append(time.perf_counter() - began)
            if lane is not None:
                episode.lane = lane
            with lock:
                if not abandoned.is_set():
                    episodes.append(episode)
                    return
            episode.close()

        def open_while_quick() -> None:
            """Open episodes; return early if one is slow."""
            while len(episodes) < count and not abandoned.is_set():
                open_one()
                if seconds[-1] >= QUICK_S:
                    return

        async def call(function: Callable[[], None], lane: Lane | None = None) -> None:
            with in_lane(lane):
                await call_user_code("opening an episode", function, limit_s=limit_s or OPEN_LIMIT_S)

        lanes = [Lane() for _ in range(count)] if getattr(self._environment, "keeps_state", False) else []
        try:
            if self.is_quick and not lanes:
                await call(open_while_quick)
            left: Sequence[Lane | None] = lanes or [None] * (count - len(episodes))
            await asyncio.gather(*(call(partial(open_one, lane), lane) for lane in left))
        except BaseException as error:  # also Ctrl-C: threads cannot be ended; what they open from now on is closed
            with lock:
                abandoned.set()
            for lane in set(lanes) - {getattr(episode, "lane", None) for episode in episodes}:
                lane.end()
            if not isinstance(error, Exception):
                close_now(episodes)
                raise
            await close_episodes(episodes)
            return NotOpened(str(error), error.__cause__)
        self.is_quick = median(seconds) < QUICK_S and max(seconds) < SLOW_S
        return episodes


async def close_episodes(episodes: Sequence[Episode]) -> None:
    """Close each in its lane, and those without one in one thread. One that takes long costs no attempt."""
    lanes = [(episode, lane) for episode in episodes if (lane := getattr(episode, "lane", None)) is not None]
    parts: list[tuple[Sequence[Episode], Lane | None]] = [([episode], lane) for episode, lane in lanes]
    if len(lanes) < len(episodes):
        parts.append(([e for e in episodes if getattr(e, "lane", None) is None], None))

    async def close(part: Sequence[Episode], lane: Lane | None) -> None:
        if lane is not None and lane.is_stuck:
            return lane.end(part[0].close)
        try:
            with in_lane(lane):
                await call_user_code("closing an attempt", _close, part, limit_s=CLOSE_LIMIT_S)
        except RolloutError as error:
            log.warning("%s; it continues in the background", error)
        finally:
            if lane is not None:
                lane.end()

    await asyncio.gather(*(close(part, lane) for part, lane in parts))


def close_now(episodes: Sequence[Episode]) -> None:
    """Begin to close episodes, without waiting for it."""
    loose = []
    for episode in episodes:
        lane: Lane | None = getattr(episode, "lane", None)
        if lane is not None:
            lane.end(episode.close)
        else:
            loose.append(episode)
    if loose:
        Lane().end(partial(_close, loose))


def _close(episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        episode.close()


def tools_of(environment: Environment, problem: Problem) -> list[Tool]:
    """The tools of a problem's episode, which is opened and closed within OPEN_LIMIT_S.

    Raises what opening it raises, and PalestraError when that takes too long. For use before a run.
    """

    async def look() -> list[Tool]:
        opened = await Opener(environment).open(problem, 1)
        if isinstance(opened, NotOpened):
            if not isinstance(opened.error, CallTimeout):
                raise opened.error or RolloutError(opened.reason)
            raise OpenTimeout(
                f"the environment's first episode did not open within {OPEN_LIMIT_S:g} s; "
                "check that the servers and containers it needs are running"
            )
        tools = list(opened[0].tools)
        await close_episodes(opened)
        return tools

    return outside_event_loop(lambda: asyncio.run(look()))
