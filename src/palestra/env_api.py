"""Environments in one call each: train on one, evaluate it, write scored groups, or serve it to a trainer.

torch is loaded only where a model is: scoring an endpoint does without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from palestra.agents.agent import Agent
from palestra.core.config import RunConfig
from palestra.core.run_folder import Resume
from palestra.core.time_limit import outside_event_loop
from palestra.envs.base import Environment, Split
from palestra.envs.running import RunningEnv, tools_of
from palestra.evals.report import EvalReport
from palestra.models.chat.template import ChatFormat
from palestra.policy.build import policy_of
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.result import GRPOTrainingResult
from palestra.rollout.agent_loop import endpoint_speakers
from palestra.rollout.collect import AgentLoop, Collector
from palestra.rollout.local_models import LocalModels
from palestra.train.evaluation import Evaluator
from palestra.train.limits import attempt_limits
from palestra.train.watcher import Watcher
from palestra.trainer import GRPOTrainer, load_quietly


def train_env(
    env: RunningEnv,
    config: RunConfig,
    *,
    watcher: Watcher | None = None,
    record: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    resume: Path | Resume | None = None,
    advantages: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
) -> GRPOTrainingResult:
    """Train a model on an environment; scored before and after on its held-out problems.

    `advantages` and `loss` are functions in the place of the built-in ones (docs/objectives.md).
    """
    tools = tools_of(env, env.problems("train")[0])
    agent = Agent(env.name.replace("/", "-"), config.model.name, env.env.instructions, tools)
    trainer = GRPOTrainer(agent, config=config, watcher=watcher, folder=folder, advantages=advantages, loss=loss)
    return trainer.train_on(env, record=record, resume=resume)


def evaluate_env(
    env: RunningEnv, config: RunConfig, *, openai: OpenAISettings | None = None, watcher: Watcher | None = None
) -> tuple[EvalReport, dict[str, float]]:
    """Score a model, or an OpenAI-style endpoint, on the held-out problems; with the environment's own numbers.

    Where an environment holds none out, the training problems are scored, and the report's `split` says so.
    """
    split: Split = "held_out" if env.problems("held_out") else "train"

    def score() -> EvalReport:
        with asyncio.Runner() as runner:
            make_collector, _ = collectors(config, openai, training=False)
            evaluator = Evaluator(make_collector(env), env.problems(split), config, split)
            return evaluator.run(runner, watcher or Watcher(), "scoring")

    report = outside_event_loop(score)
    return report, {name: float(value) for name, value in env.env.evaluate(report.rollouts).items()}


def collectors(
    config: RunConfig, openai: OpenAISettings | None, *, training: bool
) -> tuple[Callable[[Environment], Collector], LocalModels]:
    """A function that makes the collector of an environment, by the model of the config or by an endpoint; and the
    models of this process that measures may ask."""
    if openai is None:
        from palestra.train.setup import suited_to
        from palestra.train.tasks import agent_collector

        config.refuse(["backend", "tinker", "ray"], "a model is scored on this machine, unless it is in training")
        loaded = load_quietly(config, training=False)
        policy, chat = policy_of(loaded.model, loaded.tokenizer, config.model), ChatFormat(loaded.tokenizer)
        suited = suited_to(config, loaded.model)
        return lambda env: agent_collector(env, policy, chat, suited, training=training), LocalModels(policy, chat)
    config.refuse(["rollout.constrain_tool_calls"], "the endpoint samples, and it takes no grammar")
    config.refuse(["rollout.unexpected_call_format"], "the endpoint reads tool calls by itself")
    limits, speakers = attempt_limits(config, training=training), endpoint_speakers(OpenAIChat(openai))
    at_once = config.rollout.max_open_episodes
    return lambda env: Collector(env, AgentLoop(limits, speakers), max_open_episodes=at_once), LocalModels()
