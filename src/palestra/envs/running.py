"""Runs a subclass of Env as the Environment that the rollout loop drives. What its methods raise fails one attempt.

Episodes are opened and closed within time limits: user code may start a program or call a server for each.
"""

from __future__ import annotations

import copy
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from palestra.agents.tools.tool import Tool, as_tool, tools_by_name
from palestra.core.calls import call_with_limit, calls_with_limit, user_code
from palestra.core.errors import CallTimeout, PalestraError, RolloutError, ServiceError, UserCodeError, text_of
from palestra.core.messages import as_messages, with_text
from palestra.core.text import shorten
from palestra.core.time_limit import time_limit
from palestra.core.types import Message, Problem, Score, ToolResult
from palestra.envs.base import Environment, Episode, Split
from palestra.envs.env import Env, ProblemList, env_name, problem_list, tool_methods
from palestra.evals.measures import Measure, as_score
from palestra.models.chat.toolcalls import strip_reasoning

STEP_TIMEOUT_S = 300.0
NAMED_AFTER_S = 60.0  # a method that the run waits for
log = logging.getLogger("palestra")


@dataclass(frozen=True)
class EnvEpisode:
    """One attempt, on a copy of the environment that is its own."""

    env: Env
    prompt: Sequence[Message]
    tools: Sequence[Tool]
    error: str | None = None  # it could not begin: the attempt fails as soon as the model has spoken

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
        reply = await self._call("step", messages)
        with time_limit(STEP_TIMEOUT_S), user_code():  # of a generator
            return () if reply is None else as_messages(reply)

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        self.env.tool_results = tuple(tool_results)
        scores = self.as_scores(await self._call("score", messages))
        if type(self.env).score_turns is Env.score_turns:
            return scores
        of_turns = await call_with_limit(self.env.score_turns, timeout_s=STEP_TIMEOUT_S)
        if of_turns is None:
            return scores
        by_name = of_turns if isinstance(of_turns, Mapping) else {"turns": of_turns}
        return {**scores, **{name: as_score(Measure(name, self.env.score_turns), v) for name, v in by_name.items()}}

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
                self.env.close()
        except Exception as error:
            log.warning("%s", text_of(error, f"{type(self.env).__name__}.close"))

    async def _call(self, method: str, messages: Sequence[Message]) -> Any:
        if self.error:
            raise RolloutError(self.error)
        self.env.messages = tuple(messages)
        answer = next((m.text for m in reversed(messages) if m.role == "assistant"), "")
        return await call_with_limit(getattr(self.env, method), strip_reasoning(answer), timeout_s=STEP_TIMEOUT_S)


class RunningEnv:
    """An Env that is set up and hands out problems and attempts."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.name = env_name(type(env))
        self.max_text_chars = 20_000  # of `start`; set to rollout.max_tool_result_chars by what plays the attempts
        for method in tool_methods(type(env)):
            as_tool(getattr(env, method))  # a tool without docstring or type hints is refused now, not in every attempt
        self._required("setup", env.setup)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.env.reward_weights

    @property
    def max_episodes(self) -> int | None:
        return self.env.max_episodes

    @property
    def works_in_forks(self) -> bool:
        return self.env.works_in_forks

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
                env.problem, env.messages, env.tool_results = problem, (), ()
                if error is None:
                    if (text := env.start()) is not None:
                        prompt = with_text(prompt, shorten(str(text), self.max_text_chars))
                    tools = tuple(tools_by_name(as_tool(tool) for tool in env.tools()).values())
                if env.instructions:
                    prompt.insert(0, Message("system", env.instructions))
        except Exception as failure:
            error = text_of(failure, "beginning an attempt")
        return EnvEpisode(env, prompt, tools, error)

    async def score_group(self, episodes: Sequence[EnvEpisode]) -> list[Mapping[str, Score]] | None:
        """The scores of siblings that are judged together; None where each is scored alone."""
        if type(self.env).score_group is Env.score_group:
            return None
        attempts = [episode.env for episode in episodes]
        verdicts = await call_with_limit(self.env.score_group, attempts, timeout_s=STEP_TIMEOUT_S)
        if verdicts is None:
            return None
        if len(verdicts) != len(episodes):
            raise RolloutError(f"score_group gave {len(verdicts)} scores for {len(episodes)} attempts; return one each")
        return [episode.as_scores(verdict) for episode, verdict in zip(episodes, verdicts, strict=True)]

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


OPEN_LIMIT_S = 300.0  # an environment may start a container
CLOSE_LIMIT_S = 60.0
QUICK_S, SLOW_S = 0.001, 0.02

log = logging.getLogger("palestra")


class OpenTimeout(ServiceError):
    """An environment does not open an episode in time."""


@dataclass(frozen=True, slots=True)
class NotOpened:
    """Reason the episodes of a problem failed to open."""

    reason: str


class Opener:
    """Opens the episodes of one environment, which may start a program or call a server for each: in a thread each, or
    one after the other in one thread, where the last ones took less time than it takes to hand a thread a call.

    Judged by the median: on a busy machine a quick one takes a few milliseconds now and then.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.is_quick = False

    async def open(self, problem: Problem, count: int, limit_s: float = OPEN_LIMIT_S) -> list[Episode] | NotOpened:
        """Open all episodes, or close any that opened and return the reason."""
        episodes: list[Episode] = []
        seconds: list[float] = []  # that each took
        lock, abandoned = threading.Lock(), threading.Event()

        def open_one() -> None:
            began = time.perf_counter()
            episode = self._environment.open(problem)
            seconds.append(time.perf_counter() - began)
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

        try:
            if self.is_quick:
                await call_with_limit(open_while_quick, timeout_s=limit_s)
            await calls_with_limit([open_one] * (count - len(episodes)), timeout_s=limit_s)
        except BaseException as error:  # also Ctrl-C: threads cannot be ended; what they open from now on is closed
            with lock:
                abandoned.set()
            close_now(episodes)
            if not isinstance(error, Exception):
                raise
            return NotOpened(text_of(error, "opening an episode"))
        self.is_quick = median(seconds) < QUICK_S and max(seconds) < SLOW_S
        return episodes


async def close_episodes(episodes: Sequence[Episode]) -> None:
    """In a thread: closing may end a program, or wait for a server. One that takes long costs no attempt."""
    try:
        await call_with_limit(close_now, episodes, timeout_s=CLOSE_LIMIT_S)
    except CallTimeout as error:
        log.warning("closing the %d episodes of a group %s; it continues in the background", len(episodes), error)


def close_now(episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        episode.close()


def tools_of(environment: Environment, problem: Problem) -> list[Tool]:
    """The tools of a problem's episode, which is opened and closed in a thread, within OPEN_LIMIT_S.

    Raises what opening it raises, and PalestraError when that takes too long. For use before a run, without event loop.
    """
    outcome: queue.SimpleQueue[list[Tool] | BaseException] = queue.SimpleQueue()

    def look() -> None:
        try:
            with user_code():
                episode = environment.open(problem)
                tools = list(episode.tools)
                episode.close()
            outcome.put(tools)
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=look, name="palestra-first-episode", daemon=True).start()
    try:
        result = outcome.get(timeout=OPEN_LIMIT_S)
    except queue.Empty:
        raise OpenTimeout(
            f"the environment's first episode did not open within {OPEN_LIMIT_S:g} s; "
            "check that the servers and containers it needs are running"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result
