"""What a run trains on: a task gives the source of groups, and how held-out problems are scored."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from palestra.core.children import CAN_FORK
from palestra.core.config import RunConfig
from palestra.core.conversations import Conversation
from palestra.core.errors import SettingError, UnsupportedError
from palestra.core.extras import provided
from palestra.core.machine import processors
from palestra.core.ranks import ONE_PROCESS, Ranks, join
from palestra.core.run_folder import RunKind
from palestra.envs.base import Environment
from palestra.envs.running import OpenTimeout, tools_of
from palestra.evals.case_rates import CaseRates
from palestra.learner.base import Learner
from palestra.models.chat.grammars import grammar_compiler
from palestra.models.chat.template import ChatFormat
from palestra.models.chat.written import check_tool_calls, tool_call_problem
from palestra.models.loading import device_named
from palestra.policy.base import Policy
from palestra.policy.local import LocalPolicy
from palestra.policy.workers import tokenizer_of, tokenizer_parts
from palestra.rollout.agent_loop import token_speakers
from palestra.rollout.collect import AgentLoop, Collector, GroupCollector, RemoteCollector
from palestra.rollout.custom import FunctionRunner, RolloutFunction
from palestra.rollout.local_models import LocalModels
from palestra.rollout.rewards import RewardFunction, RewardFunctions, TrainerState
from palestra.rollout.workers import RolloutWorkers
from palestra.train.evaluation import Evaluator
from palestra.train.group_source import GroupSource, NoMoreGroups, ProblemSource
from palestra.train.limits import attempt_limits
from palestra.train.update import total_steps
from palestra.train.watcher import Watcher

# of our agent loop alone
OWN_LOOP = ("rollout.compact_at", "rollout.keep_reasoning", "rollout.workers", "train.deterministic")
MIN_WORKERS, MAX_WORKERS = 3, 8  # that a run chooses by itself
_NEEDS_ENGINE = "they need the paged engine in this process, and one rank"

log = logging.getLogger("palestra")


@dataclass(frozen=True)
class Parts:
    """What a task may use of the run that it is part of."""

    config: RunConfig
    policy: Policy[Any]
    tokenizer: Any
    runner: asyncio.Runner
    watcher: Watcher
    step: int = 0  # of the checkpoint that it goes on from
    ranks: Ranks = ONE_PROCESS
    checkpoints: Path | None = None  # the folder of the run's own

    @cached_property
    def chat(self) -> ChatFormat:
        return ChatFormat(self.tokenizer)


class Task(Protocol):
    """Something to train on."""

    @property
    def kind(self) -> RunKind: ...

    @property
    def problem_count(self) -> int | None:
        """Problems in one epoch; None where there is no last one."""
        ...

    def source(self, parts: Parts) -> GroupSource: ...

    def evaluator(self, parts: Parts) -> Evaluator | None:
        """How to score the model; None where it cannot be scored here."""
        ...


@dataclass(slots=True)
class EnvironmentTask:
    """An environment in this process, attempted by our agent loop, or by a user's `rollout_func`."""

    environment: Environment
    reward_functions: Sequence[RewardFunction] = ()
    rollout_func: RolloutFunction | None = None
    trainer: Any = None  # what rollout_func is given
    examples: Sequence[Conversation] = ()  # the agent's, for an sft stage
    scored: bool = True  # before and after the training
    workers: RolloutWorkers | None = field(default=None, init=False)  # processes of the agent loop
    _workers_are_chosen: bool = field(default=False, init=False, repr=False)

    @property
    def kind(self) -> RunKind:
        return "agent" if self.rollout_func is None else "function"

    @property
    def problem_count(self) -> int:
        return len(self.environment.problems("train"))

    def start_workers(self, config: RunConfig) -> None:
        """Fork the processes of the agent loop that the run may need. Call it before the model is loaded."""
        if self._workers_are_chosen or self.rollout_func is not None:
            return
        self._workers_are_chosen = True
        if count := worker_count(self.environment, config):
            _ = self.problem_count  # what the environment loads for its problems is in the workers as well
            self.workers = RolloutWorkers(partial(_collectors_of_worker, self), count, config.seed)

    def close_workers(self) -> None:
        if self.workers is not None:
            self.workers.close()
        self.workers, self._workers_are_chosen = None, False

    def source(self, parts: Parts) -> ProblemSource:
        self.start_workers(parts.config)
        parts.config.refuse(["agent"], "the agent has no program of its own, it runs in our agent loop")
        tools = _tools_of(self.environment)  # to find out now, not in every rollout, whether they can be used as asked
        if tools and parts.config.rollout.constrain_tool_calls:
            grammar_compiler(parts.tokenizer)(json.dumps([tool.schema for tool in tools]))
        if tools is not None and not tools and parts.config.echo.coefficient > 0:
            raise SettingError(
                "echo.coefficient > 0 learns from tool results, but this agent has no tools; give it some or use 0"
            )
        if self.workers is not None:
            self._connect(self.workers, parts)
        collector = self.collector(parts, training=True)
        return source_of(self.environment, collector, parts, on_close=self.close_workers)

    def _connect(self, workers: RolloutWorkers, parts: Parts) -> None:
        """Let the workers sample with the policy, or end them if they do not suit it."""
        is_chosen = parts.config.rollout.workers is not None
        if isinstance(policy := parts.policy, LocalPolicy) and (is_chosen or policy.engine.runner.overlaps):
            rollout = parts.config.rollout
            at_once = max(rollout.group_size, rollout.max_open_episodes // len(workers))
            config = parts.config.with_settings({"rollout.max_open_episodes": at_once})
            workers.start(policy, config.model_dump(mode="json"), tokenizer_parts(parts.tokenizer))
            return
        self.close_workers()
        if is_chosen:
            raise SettingError(f"rollout.workers = {parts.config.rollout.workers}: {_NEEDS_ENGINE}; leave it out")

    def evaluator(self, parts: Parts) -> Evaluator | None:
        return evaluator_of(self.environment, self.collector(parts, training=False), parts) if self.scored else None

    def collector(self, parts: Parts, *, training: bool) -> GroupCollector:
        """Attempts problems: here, in other processes, or by actors of the policy."""
        if self.rollout_func is not None:
            rewards = rewards_of(self.environment, self.reward_functions, parts)
            ours = ["rollout.constrain_tool_calls", "rollout.unexpected_call_format", "train.expert_routing", *OWN_LOOP]
            parts.config.refuse(ours, "rollout_func samples by itself")
            parts.config.refuse(["rollout.max_staleness"], "rollout_func may sample from the model that is trained")
            if parts.policy.samples_groups:
                raise UnsupportedError("rollout_func samples in the process that trains; use backend: local with it")
            host, at_once = LocalModels(parts.policy, parts.chat), parts.config.rollout.max_open_episodes
            runner = FunctionRunner(self.rollout_func, self.trainer, parts.chat, parts.policy)
            return Collector(self.environment, runner, rewards, at_once, host)
        collector = self._agent_collector(parts, training=training)
        if parts.policy.samples_groups:
            task = replace(self, trainer=None)
            return parts.policy.group_collector(parts.config, task, training, collector.groups_at_once)
        if (workers := self.workers) is not None:
            of_each: Callable[[int], int] = lambda size: max(1, collector.groups_at_once(size) // len(workers))  # noqa: E731
            return RemoteCollector(workers, training, of_each)
        if parts.ranks.size > 1:
            ranks = provided("rollouts of several ranks")(parts.ranks, collector)
            return RemoteCollector(ranks, training, collector.groups_at_once)
        return collector

    def _agent_collector(self, parts: Parts, *, training: bool) -> Collector:
        """Our agent loop, with the reward functions."""
        rewards = rewards_of(self.environment, self.reward_functions, parts)
        parts_of_it = self.environment, parts.policy, parts.chat, parts.config
        return agent_collector(*parts_of_it, training=training, rewards=rewards)


@dataclass(slots=True)
class FinishTask:
    """A run without groups: one that is only scored (`scored_by` as for the environments over the wire), or that only
    learns from demonstrations."""

    scored_by: EnvironmentTask | None
    problem_count: int | None = None
    kind: RunKind = "wire"

    def source(self, parts: Parts) -> NoMoreGroups:
        return NoMoreGroups()

    def evaluator(self, parts: Parts) -> Evaluator | None:
        return None if self.scored_by is None else self.scored_by.evaluator(parts)


def evaluator_of(environment: Environment, collector: GroupCollector, parts: Parts) -> Evaluator:
    """Scores the held-out problems, or those of the training where none are held out."""
    held_out = environment.problems("held_out")
    if not held_out:
        parts.watcher.note("no problems are held out: before and after are scored on the training problems")
    problems = held_out or environment.problems("train")
    return Evaluator(collector, problems, parts.config, "held_out" if held_out else "train")


def source_of(
    environment: Environment, collector: GroupCollector, parts: Parts, on_close: Callable[[], None] = lambda: None
) -> ProblemSource:
    """The problems of training, attempted by a collector."""
    size, train = parts.config.rollout.group_size, parts.config.train
    learnable = train.sampling == "learnable"
    return ProblemSource(
        collector,
        environment.problems("train"),
        environment.reward_weights,
        size,
        parts.config.seed,
        concurrent=collector.groups_at_once(size),
        watcher=parts.watcher,
        on_close=on_close,
        gives_back=not learnable,  # what was sampled is used
        rates=CaseRates(train.sampling_half_life) if learnable else None,
    )


def rewards_of(environment: Environment, functions: Sequence[RewardFunction], parts: Parts) -> RewardFunctions:
    """The reward functions in addition to an environment's measures; they count every policy update as a step."""

    def state() -> TrainerState:
        done, count = parts.policy.version, len(environment.problems("train"))
        epoch = done * parts.config.train.problems_per_step / count
        return TrainerState(done, total_steps(parts.config, count), epoch)

    return RewardFunctions(functions, measures=environment.reward_weights, state=state)


def agent_collector(
    environment: Environment, policy: Policy[Any], chat: ChatFormat, config: RunConfig, *, training: bool,
    rewards: RewardFunctions | None = None, **more: Any,
) -> Collector:  # fmt: skip
    """Our agent loop over an environment and a policy, sampling for training or for evaluation; `more` limits."""
    if tool_call_problem(chat) and _tools_of(environment):
        check_tool_calls(chat)
    limits = replace(attempt_limits(config, chat.stop_token_ids, training=training), **more)
    speakers = token_speakers(policy, chat, limits.unexpected_call_format)
    at_once, host = config.rollout.max_open_episodes, LocalModels(policy, chat)
    return Collector(environment, AgentLoop(limits, speakers), rewards or RewardFunctions(), at_once, host)


def _collectors_of_worker(
    task: EnvironmentTask, policy: Policy[Any], settings: dict[str, Any], tokenizer: dict[str, Any]
) -> dict[bool, Collector]:
    """What one of the worker processes collects with, for training and for evaluations."""
    config = RunConfig.build(settings)
    np.random.seed(config.seed)  # of tools that use them, as `load_for_run` does in the process that has the model
    torch.manual_seed(config.seed)
    parts = Parts(config, policy, tokenizer_of(tokenizer), asyncio.Runner(), Watcher())
    return {training: task._agent_collector(parts, training=training) for training in (True, False)}


def worker_count(environment: Environment, config: RunConfig) -> int:
    """How many processes run the agent loop besides this one; by default only where it is known to be safe.

    Decided without the model, which may have a policy without workers: then they end.
    """
    asked, reason = config.rollout.workers, None
    if asked == 0:
        return 0
    if not config.has_own_engine or join(config).size > 1:
        reason = _NEEDS_ENGINE
    elif getattr(environment, "max_episodes", None) is not None:
        reason = "this environment limits how many attempts may be open"
    count = asked
    if count is None:
        suits = reason is None and getattr(environment, "works_in_forks", False)
        count = min(MAX_WORKERS, processors() // 2)
        if not suits or count < MIN_WORKERS or device_named(config.model.device).type != "cuda":
            return 0
    if not CAN_FORK:
        reason = reason or "this platform cannot fork processes"
    elif torch.cuda.is_initialized():
        reason = reason or "this process has used the GPU already, and cannot be forked any more"
    if reason is None:
        return count
    if asked is not None:
        raise SettingError(f"rollout.workers = {asked}: {reason}; leave it out")
    log.warning("rollouts run in this process, without rollout.workers: %s", reason)
    return 0


def offered_tools(task: Task) -> list[Any]:
    """The tools of a task's first problem; none where it is not in this process."""
    return (_tools_of(task.environment) or []) if isinstance(task, EnvironmentTask) else []


def _tools_of(environment: Environment) -> list[Any] | None:
    """The tools of the first problem; None if it cannot be opened: that fails its attempts, not the run."""
    try:
        problems = environment.problems("train") or environment.problems("held_out")
        return tools_of(environment, problems[0])
    except OpenTimeout:
        raise
    except Exception:
        return None


def require_ranks_support(config: RunConfig, task: Task, own: Learner | Policy[Any] | None) -> None:
    """PalestraError for what cannot be divided among ranks."""
    remedy = "start it without --nproc and torchrun"
    if own is not None:
        raise SettingError(f"a learner or a policy of your own is one of this process, and there are several; {remedy}")
    if not isinstance(task, EnvironmentTask) or task.rollout_func is not None:
        what = "a rollout_func" if isinstance(task, EnvironmentTask) else f"a {type(task).__name__}"
        raise UnsupportedError(
            f"{what} gives its groups to one process, and there are several; ranks share the problems of agent files "
            f"and environments. Otherwise {remedy}"
        )
    config.refuse(["backend", "tinker"], f"ranks train and sample on their own machines; {remedy}")
    config.refuse(["vllm", "rollout.policy_url"], "each rank samples with an engine of its own")
    config.refuse(["rollout.max_staleness"], "ranks sample and learn in turns")
    config.refuse(["lora.load_in_4bit"], "weights of 4 bits are not divided among ranks")
